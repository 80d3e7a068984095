"""Triton's interpreter, faster: the same kernels, the same numbers. Most of its time went to two things that it need not do (triton 3.9):
it patches `triton.language` anew for every call of a device function, and folds xor, of which `tl.sort` is made, one element at a time in Python."""
from triton.runtime import interpreter as I

patched, grids = set(), []                             # modules whose view of the language this launch has patched; what was launched


def launch(self, *args, call=I.GridExecutor.__call__, **kwargs):
    patched.clear()
    grids.append(self.grid)
    return call(self, *args, **kwargs)


def device_function(self, *args, **kwargs):
    if (home := self.fn.__module__) not in patched: I._patch_lang(self.fn); patched.add(home)
    try: return self.rewrite()(*args, **kwargs)
    except Exception as e: raise I.InterpreterError(repr(e)) from e


def reduce(self, input, slowly=I.ReduceOps.apply_impl):
    if self.combine_fn is not I.tl.standard._xor_combine or self.axis is None: return slowly(self, input)
    return [self.to_tensor(I.np.bitwise_xor.reduce(t.handle.data, axis=self.axis, keepdims=self.keep_dims), t.dtype) for t in input]


I.GridExecutor.__call__, I.InterpretedFunction.__call__, I.ReduceOps.apply_impl = launch, device_function, reduce
