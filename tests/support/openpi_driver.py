"""Drives the real openpi-client on orders from standard input. Runs in the client's own environment, without ours."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def say(answer):
    print(json.dumps(answer), flush=True)


def infer(policy, order):
    with np.load(order["arrays"]) as file:
        arrays = {name.replace("|", "/"): file[name] for name in file.files}
    result = policy.infer({**arrays, **order["plain"]})
    if isinstance(result, np.ndarray):
        path = order["arrays"].removesuffix(".npz") + "-answer.npy"
        np.save(path, result)
        return {"array": path}
    return {"value": {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in result.items()}}


def main():
    address, *api_key = sys.argv[1:]
    try:
        policy = WebsocketClientPolicy(host=address, api_key=api_key[0] if api_key else None)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"metadata": policy.get_server_metadata()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say({"value": policy.reset()} if "reset" in order else infer(policy, order))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


main()
