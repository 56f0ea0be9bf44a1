// Shows a world on the texture of this object and steers it with W A S D and I J K L. Put it on a Quad or a RawImage's parent.
// Format rgb24: no decoder is needed. It takes 19 MB/s at 832x480; for a server elsewhere use h264 with a decoder plug-in,
// whose input is one access unit of Chunk.Samples() a frame.
using System;
using System.Collections.Generic;
using System.Linq;
using UnityEngine;
using Worldserve;

public sealed class WorldScreen : MonoBehaviour
{
    public string address = "ws://127.0.0.1:8000/v1/world";
    public string prompt = "a small town, day";
    public string image = "day";
    public string token = "";

    private static readonly Dictionary<KeyCode, string> Keys = new Dictionary<KeyCode, string>
    {
        { KeyCode.W, "w" }, { KeyCode.A, "a" }, { KeyCode.S, "s" }, { KeyCode.D, "d" },
        { KeyCode.I, "i" }, { KeyCode.J, "j" }, { KeyCode.K, "k" }, { KeyCode.L, "l" },
    };

    private readonly Queue<KeyValuePair<Chunk, int>> frames = new Queue<KeyValuePair<Chunk, int>>();
    private WorldClient world;
    private Texture2D texture;
    private byte[] upsideDown;
    private string held = "";
    private float untilNextS;
    private float frameS;

    private async void Start()
    {
        world = new WorldClient(new Uri(address), token == "" ? null : token);
        await world.Start(prompt, image, "rgb24");
        var width = (int)(double)world.Started["width"];
        var height = (int)(double)world.Started["height"];
        frameS = 1f / (float)(double)world.Started["fps"];
        texture = new Texture2D(width, height, TextureFormat.RGB24, false);
        upsideDown = new byte[width * height * 3];
        GetComponent<Renderer>().material.mainTexture = texture;
    }

    private void Update()
    {
        if (texture == null) return;
        Chunk chunk;
        while (world.TryTake(out chunk))
            for (var frame = 0; frame < chunk.NumFrames; frame++) frames.Enqueue(new KeyValuePair<Chunk, int>(chunk, frame));
        Steer();
        untilNextS -= Time.deltaTime;
        if (untilNextS > 0 || frames.Count == 0) return;
        untilNextS = Math.Max(untilNextS + frameS, 0);
        Show(frames.Dequeue());
    }

    private void Show(KeyValuePair<Chunk, int> frame)
    {
        var picture = frame.Key.Picture(frame.Value);
        var rowBytes = texture.width * 3;
        // Textures begin at the bottom, pictures at the top.
        for (var row = 0; row < texture.height; row++)
            Buffer.BlockCopy(picture.Array, picture.Offset + row * rowBytes, upsideDown, (texture.height - 1 - row) * rowBytes, rowBytes);
        texture.LoadRawTextureData(upsideDown);
        texture.Apply();
        if (frame.Value == 0) world.ReportShown(frame.Key, frames.Count * frameS * 1000);
    }

    private void Steer()
    {
        var keys = Keys.Where(key => Input.GetKey(key.Key)).Select(key => key.Value).ToArray();
        var now = string.Join("", keys);
        if (now == held) return;
        held = now;
        world.Hold(keys);
    }

    private void OnDestroy()
    {
        if (world == null) return;
        world.Close().ContinueWith(closed => world.Dispose());
    }
}
