"""PyTorch's scaled_dot_product_attention on the CPU, run on request: one JSON object a line in, one out."""

import json
import sys
import time


def answer(**fields):
    print(json.dumps(fields), flush=True)


try:
    import torch
except ImportError as error:
    answer(error=f"python3 cannot import torch: {error}")
    sys.exit(0)


def load(path, dtype, shape):
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=dtype).view(shape)


def timed(work):
    start = time.perf_counter_ns()
    result = work()
    return (time.perf_counter_ns() - start) / 1000, result


state = {}
answer(version=torch.__version__)
for line in sys.stdin:
    command = json.loads(line)
    try:
        if command["op"] == "setup":
            torch.set_num_threads(command["threads"])
            types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32}
            dtype = types[command["dtype"]]
            for name in "qkv":
                values = load(command[name], dtype, command["shape_" + name])
                held = state.get(name)
                if held is not None and held.shape == values.shape and held.dtype == values.dtype:
                    held.copy_(values)  # new values at the same address
                else:
                    state[name] = values
            how = state["how"] = {"scale": command["scale"]}
            rows, keys = command["shape_q"][2], command["shape_k"][2]
            lower, upper = command["diagonals"]
            if (lower, upper) == (None, 0):  # is_causal aligns its diagonal to the top left
                how["is_causal"] = True
            elif (lower, upper) != (None, None):
                mask = torch.ones(rows, keys, dtype=torch.bool)
                mask = mask if upper is None else mask.tril(diagonal=upper)
                how["attn_mask"] = mask if lower is None else mask.triu(diagonal=lower)
            if command["shape_q"][1] != command["shape_k"][1]:
                how["enable_gqa"] = True  # torch 2.5 or later
            answer(ok=True)
        elif command["op"] == "run":
            with torch.inference_mode():
                us, state["out"] = timed(lambda: torch.nn.functional.scaled_dot_product_attention(
                    state["q"], state["k"], state["v"], **state["how"]))
            answer(us=us)
        elif command["op"] == "forget":
            state["out"] = None
            answer(ok=True)
        elif command["op"] == "save":
            out = state["out"]
            with open(command["path"], "wb") as file:
                file.write(b"" if out is None else out.contiguous().view(torch.uint8).numpy().tobytes())
            answer(ok=True)
        elif command["op"] == "sgemm":
            n = command["n"]
            a, b = torch.rand(n, n), torch.rand(n, n)
            torch.mm(a, b)
            answer(us=min(timed(lambda: torch.mm(a, b))[0] for _ in range(command["repeats"])))
        else:
            answer(error="unknown op " + command["op"])
    except Exception as error:  # the parent process decides how to handle the error
        answer(error=f"{type(error).__name__}: {error}")
