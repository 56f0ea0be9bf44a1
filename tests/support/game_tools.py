"""Tool chains for the game clients in clients/examples/games, where they are installed.

`apt-get install mono-mcs mono-runtime godot3-server` brings both on Debian.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GAMES = Path(__file__).resolve().parents[2] / "clients/examples/games"
TIMEOUT_S = 90.0

UNITY_STUB = """
// As much of Unity as WorldScreen.cs uses, to see that it compiles.
namespace UnityEngine
{
    public enum KeyCode { W, A, S, D, I, J, K, L }
    public enum TextureFormat { RGB24 }
    public static class Input { public static bool GetKey(KeyCode key) { return false; } }
    public static class Time { public static float deltaTime { get { return 0f; } } }
    public class Texture { public int width, height; }
    public class Texture2D : Texture
    {
        public Texture2D(int width, int height, TextureFormat format, bool mipChain) { }
        public void LoadRawTextureData(byte[] data) { }
        public void Apply() { }
    }
    public class Material { public Texture mainTexture; }
    public class Renderer { public Material material; }
    public class MonoBehaviour { public T GetComponent<T>() { return default(T); } }
}
"""


class ToolFailed(Exception):
    """Report that a program ended with an error, and what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameTool:
    """A headless client that is ready to run: the command that its arguments follow."""

    name: str
    command: tuple[str, ...]

    async def run(self, *arguments: str) -> list[str]:
        """Return the lines that begin with a word of the client's own. Raises `ToolFailed`."""
        output = await _run([*self.command, *arguments])
        ours = ("chunk ", "applied ", "resumed ", "closed ")
        return [line for line in output.splitlines() if line.startswith(ours)]


async def installed_tools(folder: Path) -> list[GameTool]:
    """Build a client with each tool chain that is here; `folder` is for what they make."""
    tools = []
    if shutil.which("mcs") and shutil.which("mono"):
        tools.append(await _csharp(folder))
    if godot := shutil.which("godot3-server"):
        project = folder / "godot"
        shutil.copytree(GAMES / "godot", project)
        (project / "project.godot").touch()
        command = (godot, "--no-window", "--path", str(project), "--script", "headless.gd")
        tools.append(GameTool(name="godot", command=command))
    return tools


async def _csharp(folder: Path) -> GameTool:
    program, screen = folder / "headless.exe", folder / "screen.dll"
    unity = GAMES / "unity"
    parts = [str(unity / name) for name in ("Json.cs", "WorldWire.cs", "WorldClient.cs")]
    await _run(["mcs", "-warnaserror", f"-out:{program}", *parts, str(unity / "Headless.cs")])
    stub = folder / "UnityStub.cs"
    stub.write_text(UNITY_STUB, encoding="utf-8")
    await _run(["mcs", "-target:library", f"-out:{screen}", *parts, str(unity / "WorldScreen.cs"), str(stub)])
    return GameTool(name="mono", command=("mono", str(program)))


async def _run(command: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "LANG": "en_US.UTF-8"},
    )
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    if process.returncode != 0:
        raise ToolFailed(f"{command[0]} ended with {process.returncode}: {output.decode()}")
    return output.decode()
