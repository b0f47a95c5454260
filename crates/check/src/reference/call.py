"""Calls a function on arrays: call.py FILE FUNCTION FOLDER ARGUMENT ….

An argument is a number, or @NAME for the array in FOLDER/NAME. The result goes to FOLDER/answer.npy."""

import os
import runpy
import sys

try:
    import numpy
except ImportError:
    sys.exit("NumPy is missing; install it, or set FLASHCORE_PYTHON to an interpreter that has it")

file, function, folder, *words = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(file)))


def argument(word):
    if word.startswith("@"):
        return numpy.load(os.path.join(folder, word[1:]))
    return float(word[7:-2]) if word.startswith("float(") else int(word)


if not os.path.isfile(file):
    sys.exit(f"there is no file {file}")
found = runpy.run_path(file).get(function)
if not callable(found):
    sys.exit(f"{file} has no function {function}")
answer = numpy.asarray(found(*map(argument, words)))
if answer.dtype.kind not in "fiub":
    sys.exit(f"the result has elements of type {answer.dtype}; expected numbers")
if answer.dtype == bool or answer.dtype.itemsize > 8:
    answer = answer.astype(numpy.float64)
numpy.save(os.path.join(folder, "answer.npy"), numpy.ascontiguousarray(answer).reshape(answer.shape))
