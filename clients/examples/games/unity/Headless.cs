// The client without a window: `mcs -out:headless.exe Json.cs WorldWire.cs WorldClient.cs Headless.cs && mono headless.exe ...`.
//
//     headless.exe FILE                                              one binary frame from a file
//     headless.exe URL PROMPT IMAGE FORMAT SEED CHUNKS [PING_MS]     so many chunks; then a key, a lost link, a close
using System;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Security.Cryptography;
using System.Threading.Tasks;
using Worldserve;

public static class Headless
{
    private const int GiveUpS = 60;

    public static int Main(string[] arguments)
    {
        if (arguments.Length == 1) Print(Chunk.Parse(File.ReadAllBytes(arguments[0])));
        else Walk(arguments).Wait();
        return 0;
    }

    private static async Task Walk(string[] arguments)
    {
        var pingS = arguments.Length > 6 ? int.Parse(arguments[6]) / 1000.0 : 5;
        using (var world = new WorldClient(new Uri(arguments[0]), pingS: pingS))
        {
            await world.Start(arguments[1], arguments[2], arguments[3], long.Parse(arguments[4]));
            for (var index = 0; index < int.Parse(arguments[5]); index++) Print(await Show(world));
            var eventId = await world.Hold("w", "l");
            Chunk chunk;
            do chunk = await Show(world); while (!chunk.AppliedEvents().Contains(eventId));
            Console.WriteLine("applied " + eventId);
            world.DropLink();
            var before = chunk.Epoch;
            var last = chunk.Index;
            do
            {
                chunk = await Show(world);
                if (chunk.Index != last + 1) throw new FormatException("chunk " + chunk.Index + " after " + last);
                last = chunk.Index;
            }
            while (chunk.Epoch == before);
            Console.WriteLine("resumed " + chunk.Epoch);
            await world.Close();
            Console.WriteLine("closed " + world.Ended);
        }
    }

    // Take a chunk and report it at once, as if it were on screen.
    private static async Task<Chunk> Show(WorldClient world)
    {
        var waiting = Stopwatch.StartNew();
        Chunk chunk;
        while (!world.TryTake(out chunk))
        {
            if (world.Ended != null) throw new FormatException("the session ended: " + world.Ended);
            if (waiting.Elapsed.TotalSeconds > GiveUpS) throw new TimeoutException("no chunk came");
            await Task.Delay(2);
        }
        await world.ReportShown(chunk, 0);
        return chunk;
    }

    private static void Print(Chunk chunk)
    {
        var isRaw = chunk.Header.ContainsKey("shape");
        var frames = isRaw ? Enumerable.Range(0, chunk.NumFrames).Select(chunk.Picture) : chunk.Samples();
        Console.WriteLine("chunk " + chunk.Index + " " + string.Join(" ", frames.Select(Digest)));
    }

    private static string Digest(ArraySegment<byte> part)
    {
        using (var hash = SHA256.Create())
            return string.Concat(hash.ComputeHash(part.Array, part.Offset, part.Count).Take(8).Select(each => each.ToString("x2")));
    }
}
