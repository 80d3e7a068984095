"""Triton's interpreter, faster: the same kernels, the same numbers. Most of its time went to three things that it need not do (triton 3.9): it patches
`triton.language` anew for every call of a device function, folds xor, of which `tl.sort` is made, one element at a time in Python, and works out for every
sum whether it overflows only to forget it, as nobody asked for debugging."""
from collections import Counter
from dataclasses import replace

from triton.runtime import interpreter as I

patched, count = set(), Counter()                      # modules whose view of the language this launch has patched


def launch(self, *args, call=I.GridExecutor.__call__, **kwargs):
    patched.clear()
    count["launches"] += 1
    return call(self, *args, **kwargs)


def device_function(self, *args, **kwargs):
    if (home := self.fn.__module__) not in patched: I._patch_lang(self.fn); patched.add(home)
    try: return self.rewrite()(*args, **kwargs)
    except Exception as e: raise I.InterpreterError(repr(e)) from e


def reduce(self, input, slowly=I.ReduceOps.apply_impl):
    if self.combine_fn is not I.tl.standard._xor_combine or self.axis is None: return slowly(self, input)
    return [self.to_tensor(I.np.bitwise_xor.reduce(t.handle.data, axis=self.axis, keepdims=self.keep_dims), t.dtype) for t in input]


I.GridExecutor.__call__, I.InterpretedFunction.__call__, I.ReduceOps.apply_impl = launch, device_function, reduce
I.interpreter_builder.options = replace(I.interpreter_builder.options, sanitize_overflow=False)
