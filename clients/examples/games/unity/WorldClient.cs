// One session with a world over a WebSocket, for Unity and any other C# program. Call it from one thread, such as Update().
//
//     var world = new WorldClient(new Uri("ws://127.0.0.1:8000/v1/world"));
//     await world.Start("a small town, day", "day", "rgb24");
//     await world.Hold("w");
//     each frame: if (world.TryTake(out chunk)) ...; when a chunk's first picture is shown: world.ReportShown(chunk, ...)
using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Net.WebSockets;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace Worldserve
{
    public sealed class WorldClient : IDisposable
    {
        private static readonly double[] ResumeDelaysS = { 0.25, 1, 2, 4 };
        private const double CloseTimeoutS = 10;
        private static readonly Stopwatch clock = Stopwatch.StartNew();

        private readonly Uri address;
        private readonly string token;
        private readonly double pingS;
        private readonly ConcurrentQueue<Chunk> chunks = new ConcurrentQueue<Chunk>();
        private readonly SortedDictionary<long, string> unanswered = new SortedDictionary<long, string>();
        private readonly SemaphoreSlim sending = new SemaphoreSlim(1);
        private readonly CancellationTokenSource ending = new CancellationTokenSource();
        private readonly byte[] buffer = new byte[64 * 1024];
        private ClientWebSocket socket;
        private Task reading;
        private long nextEventId;
        private int lastChunkIndex = -1;
        private long heardMs;
        private volatile bool isOver;

        // A link can die without a word: there is a ping every `pingS`, and a link on which nothing has come for twice that is dropped.
        public WorldClient(Uri address, string token = null, double pingS = 5)
        {
            this.address = address;
            this.token = token;
            this.pingS = pingS;
        }

        // What the server said when it last started or resumed the session: width, height, fps, limits and more.
        public Dictionary<string, object> Started { get; private set; }
        public int Epoch { get; private set; }
        public int Run { get; private set; }
        // Why the session is over, or null.
        public string Ended { get; private set; }
        // Called for every message that is no chunk, on the thread that reads; for logs.
        public Action<Dictionary<string, object>> OnMessage;

        public async Task Start(string prompt, string imageName, string format, long? seed = null)
        {
            var start = new Dictionary<string, object>
            {
                { "type", "session.start" }, { "protocol", 1 }, { "prompt", prompt }, { "format", format },
                { "image", new Dictionary<string, object> { { "name", imageName } } },
            };
            if (seed != null) start["seed"] = seed;
            await Open(start);
            reading = Task.WhenAny(Task.Run((Func<Task>)Read), Task.Run((Func<Task>)Ping));
        }

        // Take the next chunk that has arrived. Chunks of a session come in order, each once, also over a resume.
        public bool TryTake(out Chunk chunk) { return chunks.TryDequeue(out chunk); }

        // Hold exactly these keys from the next chunk on: w a s d walk, i j k l look. No keys: let go.
        public Task<long> Hold(params string[] keys)
        {
            return SendControl("lingbot.camera_actions.v1", new Dictionary<string, object> { { "mode", "state" }, { "held", keys } });
        }

        public Task<long> SendControl(string schema, Dictionary<string, object> data)
        {
            var control = new Dictionary<string, object> { { "track", "camera" }, { "schema", schema }, { "data", data } };
            return SendEvent("controls", new[] { control });
        }

        public Task<long> Prompt(string text) { return SendEvent("prompt", text); }

        // Tell that the first picture of a chunk is on screen. Without it no more than two chunks come.
        public Task ReportShown(Chunk chunk, double bufferedMs)
        {
            if (chunk.Run != Run) return Task.CompletedTask;
            return Send(Json.Write(new Dictionary<string, object>
            {
                { "type", "playback" }, { "epoch", Epoch }, { "run", chunk.Run }, { "chunk_index", chunk.Index },
                { "buffered_ms", Math.Max(0, bufferedMs) },
            }));
        }

        // End the session. Disposing alone parks it until its time to resume has passed; so does closing without a link.
        public async Task Close()
        {
            if (!isOver) await Send("{\"type\":\"session.close\"}");
            if (reading != null) await Task.WhenAny(reading, Task.Delay(TimeSpan.FromSeconds(CloseTimeoutS)));
        }

        // Drop the connection as a bad network does; it is resumed.
        public void DropLink() { socket.Abort(); }

        public void Dispose()
        {
            isOver = true;
            ending.Cancel();
            if (socket != null) socket.Dispose();
        }

        // ------------------------------------------------------------ the link

        private async Task Open(Dictionary<string, object> start)
        {
            Heard();
            socket = new ClientWebSocket();
            if (token != null) socket.Options.SetRequestHeader("Authorization", "Bearer " + token);
            await socket.ConnectAsync(address, ending.Token);
            Heard();
            await Send(Json.Write(start));
            while (true)
            {
                var message = await Receive();
                if (!(message is string)) throw new FormatException("a chunk came before session.started");
                var fields = Json.ParseObject((string)message);
                if (OnMessage != null) OnMessage(fields);
                if ((string)fields["type"] == "error") throw new WorldRefused((string)fields["code"], (string)fields["message"]);
                if ((string)fields["type"] != "session.started") continue;
                Started = fields;
                Epoch = (int)(double)fields["epoch"];
                SetRun((int)(double)fields["run"]);
                return;
            }
        }

        private async Task Ping()
        {
            while (!isOver)
            {
                await Task.WhenAny(Task.Delay(TimeSpan.FromSeconds(pingS), ending.Token));
                if (isOver) return;
                var silentMs = clock.ElapsedMilliseconds - Interlocked.Read(ref heardMs);
                if (silentMs > 2000 * pingS) socket.Abort();
                else
                {
                    // Not awaited for longer than this: on a dead link a send may hang, and the abort ends it.
                    var sent = Send("{\"type\":\"ping\",\"t\":" + clock.ElapsedMilliseconds + "}");
                    await Task.WhenAny(sent, Task.Delay(TimeSpan.FromSeconds(pingS), ending.Token));
                }
            }
        }

        private void Heard() { Interlocked.Exchange(ref heardMs, clock.ElapsedMilliseconds); }

        private async Task Read()
        {
            while (!isOver)
            {
                try
                {
                    var message = await Receive();
                    if (message == null) await Resume();
                    else if (message is string) OnText(Json.ParseObject((string)message));
                    else OnChunk(Chunk.Parse((byte[])message));
                }
                catch (Exception error)
                {
                    if (!isOver) Ended = error.Message;
                    isOver = true;
                }
            }
        }

        // Returns a string, bytes, or null for a link that was lost. Throws for a close that can't be resumed.
        private async Task<object> Receive()
        {
            var data = new MemoryStream();
            while (true)
            {
                WebSocketReceiveResult part;
                try
                {
                    part = await socket.ReceiveAsync(new ArraySegment<byte>(buffer), ending.Token);
                }
                catch (Exception error) when (!ending.IsCancellationRequested && (error is WebSocketException || error is IOException || error is OperationCanceledException || error is ObjectDisposedException))
                {
                    return null;
                }
                Heard();
                if (part.MessageType == WebSocketMessageType.Close)
                {
                    var code = (int)(part.CloseStatus ?? 0);
                    if (code == 1001 || code == 1005 || code == 1007 || code == 1009) return null;
                    throw new WorldRefused(code.ToString(), "the server closed the connection: " + code + " " + part.CloseStatusDescription);
                }
                data.Write(buffer, 0, part.Count);
                if (part.EndOfMessage)
                    return part.MessageType == WebSocketMessageType.Text ? (object)Encoding.UTF8.GetString(data.ToArray()) : data.ToArray();
            }
        }

        private async Task Resume()
        {
            foreach (var delayS in ResumeDelaysS)
            {
                await Task.Delay(TimeSpan.FromSeconds(delayS), ending.Token);
                try
                {
                    await Open(new Dictionary<string, object>
                    {
                        { "type", "session.start" }, { "protocol", 1 }, { "resume_token", Started["resume_token"] },
                        { "last_chunk_index", lastChunkIndex }, { "run", Run },
                    });
                }
                catch (Exception error) when (!ending.IsCancellationRequested && (error is WebSocketException || error is IOException || error is FormatException || error is OperationCanceledException || error is ObjectDisposedException))
                {
                    continue;
                }
                List<string> again;
                lock (unanswered) again = new List<string>(unanswered.Values);
                foreach (var text in again) await Send(text);
                return;
            }
            throw new WorldRefused("link_lost", "the session could not be resumed");
        }

        private async Task Send(string text)
        {
            var bytes = Encoding.UTF8.GetBytes(text);
            await sending.WaitAsync(ending.Token);
            try
            {
                await socket.SendAsync(new ArraySegment<byte>(bytes), WebSocketMessageType.Text, true, ending.Token);
            }
            catch (Exception error) when (error is WebSocketException || error is IOException || error is InvalidOperationException)
            {
                // The reader notices as well, resumes, and sends again what needs an answer.
            }
            finally
            {
                sending.Release();
            }
        }

        // ------------------------------------------------------------ messages

        private async Task<long> SendEvent(string name, object value)
        {
            var eventId = nextEventId++;
            var text = Json.Write(new Dictionary<string, object> { { "type", "session.event" }, { "event_id", eventId }, { name, value } });
            lock (unanswered) unanswered[eventId] = text;
            await Send(text);
            return eventId;
        }

        private void OnText(Dictionary<string, object> message)
        {
            if (OnMessage != null) OnMessage(message);
            switch ((string)message["type"])
            {
                case "event.queued": Answered(message["event_id"]); break;
                case "error": Answered(message["event_id"]); break;
                case "session.state": SetRun((int)(double)message["run"]); break;
                case "session.closed":
                    Ended = (string)message["reason"];
                    isOver = true;
                    break;
            }
        }

        private void OnChunk(Chunk chunk)
        {
            if (!chunk.IsInit && chunk.Run == Run) lastChunkIndex = chunk.Index;
            if (!chunk.IsInit) chunks.Enqueue(chunk);
        }

        private void Answered(object eventId)
        {
            if (eventId != null) lock (unanswered) unanswered.Remove((long)(double)eventId);
        }

        private void SetRun(int run)
        {
            if (run != Run) lastChunkIndex = -1;
            Run = run;
        }
    }

    public sealed class WorldRefused : Exception
    {
        public readonly string Code;

        public WorldRefused(string code, string message) : base(code + ": " + message) { Code = code; }
    }
}
