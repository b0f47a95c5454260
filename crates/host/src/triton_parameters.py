"""Prints the parameters of a function of a Python file as JSON, which of them it loads from and stores to, and the
axes of the grid along which it reads the program's number.

Arguments: the file and the function. The file is parsed and not run.
"""

import ast
import json
import sys

ATOMICS = {"atomic_add", "atomic_cas", "atomic_max", "atomic_xchg"}
LOADS = {"load", "make_block_ptr", "make_tensor_descriptor", *ATOMICS}
STORES = {"store", *ATOMICS}

path, name = sys.argv[1:]
try:
    tree = ast.parse(open(path).read(), path)
except (OSError, SyntaxError, UnicodeDecodeError) as error:
    sys.exit(str(error))
functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
if name not in functions:
    jitted = [n for n, node in functions.items() if "jit" in "".join(map(ast.unparse, node.decorator_list))]
    sys.exit("no function %s; the Triton kernels are %s" % (name, ", ".join(jitted) or "none"))
function = functions[name]

# The parameter from which an address is computed stands leftmost: x_ptr + row * stride + columns.
origin = {}


def leftmost(node):
    while isinstance(node, (ast.BinOp, ast.Subscript, ast.Call, ast.Attribute)):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            node = node.args[0] if node.args else node.func
        else:
            node = node.value
    return node.id if isinstance(node, ast.Name) else None


for node in ast.walk(function):
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        origin.setdefault(node.targets[0].id, leftmost(node.value))


def parameter(of):
    seen = set()
    while of in origin and of not in seen:
        seen.add(of)
        of = origin[of]
    return of


read, written, axes = set(), set(), set()
for node in ast.walk(function):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "program_id":
            axis = ([k.value for k in node.keywords if k.arg == "axis"] + node.args)[0]
            axes.add(axis.value if isinstance(axis, ast.Constant) else 0)
        base = [k.value for k in node.keywords if k.arg in ("pointer", "base")] + node.args
        if base and node.func.attr in LOADS | STORES:
            found = parameter(leftmost(base[0]))
            if node.func.attr in LOADS:
                read.add(found)
            if node.func.attr in STORES:
                written.add(found)

arguments = function.args.posonlyargs + function.args.args
defaults = [None] * (len(arguments) - len(function.args.defaults)) + function.args.defaults
parameters = [
    {
        "name": argument.arg,
        "read": argument.arg in read,
        "written": argument.arg in written,
        "constant": "constexpr" in (ast.unparse(argument.annotation) if argument.annotation else ""),
        "default": None if default is None else ast.unparse(default),
    }
    for argument, default in zip(arguments, defaults)
]
print(json.dumps({"parameters": parameters, "axes": sorted(axes)}))
