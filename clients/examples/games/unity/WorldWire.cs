// The wire format of the `world` protocol (docs/protocol.md): binary frames taken apart. Knows no socket and no engine.
using System;
using System.Collections.Generic;
using System.Text;

namespace Worldserve
{
    // One binary frame: | header length, 4 bytes, big endian | header, UTF-8 JSON | payload |.
    public sealed class Chunk
    {
        public readonly Dictionary<string, object> Header;
        public readonly byte[] Frame;
        public readonly int PayloadStart;

        private Chunk(Dictionary<string, object> header, byte[] frame, int payloadStart)
        {
            Header = header;
            Frame = frame;
            PayloadStart = payloadStart;
        }

        public static Chunk Parse(byte[] frame)
        {
            if (frame.Length < 4) throw new FormatException("a binary frame of " + frame.Length + " bytes: expected at least 4");
            long headerBytes = ((long)frame[0] << 24) | ((long)frame[1] << 16) | ((long)frame[2] << 8) | frame[3];
            if (headerBytes > frame.Length - 4) throw new FormatException("the header is longer than its frame");
            var header = Json.ParseObject(Encoding.UTF8.GetString(frame, 4, (int)headerBytes));
            return new Chunk(header, frame, 4 + (int)headerBytes);
        }

        public bool IsInit { get { return (string)Header["kind"] == "init"; } }
        public int Epoch { get { return Number("epoch"); } }
        public int Run { get { return Number("run"); } }
        public int Index { get { return Number("chunk_index"); } }
        public int NumFrames { get { return Number("num_frames"); } }
        public int PayloadBytes { get { return Frame.Length - PayloadStart; } }

        // Formats `h264` and `jpeg`: frame i of the chunk, one access unit or one JPEG file.
        public List<ArraySegment<byte>> Samples()
        {
            var samples = new List<ArraySegment<byte>>();
            var at = PayloadStart;
            foreach (var size in (List<object>)Header["sizes"])
            {
                samples.Add(new ArraySegment<byte>(Frame, at, (int)(double)size));
                at += (int)(double)size;
            }
            if (at != Frame.Length) throw new FormatException("sizes do not add up to the payload");
            return samples;
        }

        // Format `rgb24`: frame i of the chunk, rows from top to bottom, 3 bytes a pixel.
        public ArraySegment<byte> Picture(int frame)
        {
            var shape = (List<object>)Header["shape"];
            var pictureBytes = (int)(double)shape[1] * (int)(double)shape[2] * (int)(double)shape[3];
            if (pictureBytes * NumFrames != PayloadBytes) throw new FormatException("the shape does not fit the payload");
            return new ArraySegment<byte>(Frame, PayloadStart + frame * pictureBytes, pictureBytes);
        }

        // Ids of the events that act in this chunk.
        public List<long> AppliedEvents()
        {
            var ids = new List<long>();
            foreach (Dictionary<string, object> applied in (List<object>)Header["applied"]) ids.Add((long)(double)applied["event_id"]);
            return ids;
        }

        private int Number(string name) { return (int)(double)Header[name]; }
    }
}
