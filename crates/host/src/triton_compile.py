"""Compiles one Triton kernel ahead of time, without a GPU, and writes the result as JSON.

Arguments: the request as JSON, and the file of the answer. The exit code is 3 when Triton is not installed.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
import warnings

warnings.simplefilter("ignore")
# The folder of this file is no place to import from.
sys.path.pop(0)
request, answer = json.loads(sys.argv[1]), sys.argv[2]
# The cache knows a kernel by its text. It would answer with the line information of another file.
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError as error:
    print(error)
    sys.exit(3)


class Anything(type):
    """The class of a stand-in for what a missing module defines: it can be called and subclassed. As a version
    it is the newest."""

    def __getattr__(cls, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments, **named):
        return cls

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())

    __or__ = __ror__ = __getitem__

    def __ge__(cls, other):
        return True

    def __lt__(cls, other):
        return False

    __gt__, __le__ = __ge__, __lt__


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that a file of the project imports and that are not installed, such as torch: host code uses
    them, kernels do not."""

    def __init__(self, project):
        self.project = project

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(self.project):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        thing = Anything("Thing", (), {})
        module.__getattr__ = lambda name: getattr(thing, name)
        return module

    def exec_module(self, module):
        pass


class Driver:
    """A stand-in for the driver of a GPU: some files ask for its device when they are imported."""

    def __getattr__(self, name):
        return Anything("Thing", (), {})

    def get_current_target(self):
        return GPUTarget("cuda", request["sm"], 32)


def levels(path):
    """How many folders up the relative imports of a file reach."""
    tree = ast.parse(open(path).read())
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def load(path, function):
    """Imports a file as a module of its package, without running the package's own `__init__.py`. Statements
    that fail do not matter if the function is defined: tutorials launch their kernels between definitions."""
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    parts, least = [os.path.splitext(name)[0]], levels(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")) or len(parts) <= least:
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    sys.path.append(folder)
    sys.path.append(os.path.dirname(path))
    inside = folder
    for count in range(1, len(parts)):
        inside = os.path.join(inside, parts[count - 1])
        package = types.ModuleType(".".join(parts[:count]))
        package.__path__ = [inside]
        sys.modules[package.__name__] = package
    sys.meta_path.append(StandIns(folder))
    spec = importlib.util.spec_from_file_location(".".join(parts), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    triton.runtime.driver.set_active(Driver())
    failures = []
    body = ast.parse(open(path).read(), path).body
    future = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in body:
        try:
            exec(compile(ast.Module(future + [node], []), path, "exec"), vars(module))
        except Exception as error:
            failures.append(error)
    triton.runtime.driver.set_active(None)
    if failures and not hasattr(module, function):
        raise failures[0]
    return module


def value(text):
    """A constant: a Python literal, or a type of Triton such as tl.float16."""
    if text.startswith(("tl.", "triton.language.")):
        found = tl
        for part in text.split(".")[1 if text.startswith("tl.") else 2 :]:
            found = getattr(found, part)
        return found
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def fail(text):
    print(text)
    sys.exit(1)


module = load(request["file"], request["function"])
found = getattr(module, request["function"], None)
if found is None:
    jitted = [name for name, thing in vars(module).items() if hasattr(thing, "arg_names")]
    fail("no function %s; the Triton kernels are %s" % (request["function"], ", ".join(jitted)))
# An autotuner or a heuristic holds the kernel. Its choices are arguments here.
while not hasattr(found, "params") or not hasattr(found, "arg_names") or hasattr(found, "configs"):
    if not hasattr(found, "fn"):
        fail("%s is not a function with @triton.jit" % request["function"])
    found = found.fn

constants = {name: value(text) for name, text in request["constants"]}
for name in constants:
    if name not in found.arg_names:
        fail("--constexpr %s: the kernel has %s" % (name, ", ".join(found.arg_names)))
for parameter in found.params:
    default = inspect.signature(found.fn).parameters[parameter.name].default
    if parameter.name in constants or default is inspect.Parameter.empty:
        continue
    if parameter.is_constexpr or len(request["types"]) < sum(n not in constants for n in found.arg_names):
        constants[parameter.name] = default
missing = [p.name for p in found.params if p.is_constexpr and p.name not in constants]
if missing:
    fail("missing --constexpr for %s" % ", ".join(missing))
names = [name for name in found.arg_names if name not in constants]
if len(names) != len(request["types"]):
    fail("%d arguments for the %d parameters %s" % (len(request["types"]), len(names), ", ".join(names)))
signature = {name: "constexpr" for name in constants}
attributes = {}
for name, text in zip(names, request["types"]):
    kind, _, hint = text.partition(":")
    signature[name] = kind
    if hint:
        attributes[(found.arg_names.index(name),)] = [["tt.divisibility", int(hint)]]
source = ASTSource(
    fn=found,
    signature={name: signature[name] for name in found.arg_names},
    constexprs=constants,
    attrs=attributes,
)
options = {key: number for key, number in request["options"].items() if number is not None}
try:
    compiled = triton.compile(source, target=GPUTarget("cuda", request["sm"], 32), options=options)
except KeyError as error:
    unknown = [text for text in request["types"] if str(error.args[0]) in text]
    if not unknown:
        raise
    fail("invalid value '%s' for --signature: expected types such as *fp32, *fp16:16, fp32, i32" % unknown[0])
except Exception as error:
    # The reason is in the error, and often in its cause. Triton's own frames say nothing about the kernel.
    said = "%s: %s" % (type(error).__name__, error)
    cause = "" if error.__cause__ is None else str(error.__cause__)
    fail(said if cause in said else said + "\n" + cause)
metadata = compiled.metadata
with open(answer, "w") as file:
    json.dump(
        {
            "ptx": compiled.asm["ptx"],
            "entry": metadata.name,
            "shared": metadata.shared,
            "threads": 32 * metadata.num_warps,
            "names": names,
        },
        file,
    )
