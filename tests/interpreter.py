"""Triton's interpreter, faster: the same kernels, the same numbers. Most of its time went to what it need not do (triton 3.9): it patches `triton.language`
anew for every call of a device function, looking for its operators in all of it, folds xor, of which `tl.sort` is made, one element at a time in Python, works
out for every sum whether it overflows only to forget it, as nobody asked for debugging, and makes the same few shapes and types anew for every number."""
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

from triton.language import core
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


# --- the language, looked up once -----------------------------------------------------------------------------------

@cache
def operators(package):
    "Operators of a module or class, each as it takes the interpreter along."
    def own(f): return lambda *args, **kwargs: f(*args, **kwargs | dict(_semantic=I.interpreter_semantic))
    return [(name, own(f.__wrapped__ if f.__code__ is core.load.__code__ else f)) for name, f in I.inspect.getmembers(package) if core.is_builtin(f)]


def patch(package, builder, scope):
    for name, f in operators(package): scope.set_attr(package, name, f)


# --- shapes and types, made once ------------------------------------------------------------------------------------

core.pointer_type.__hash__ = core.dtype.__hash__       # by name, as other types have it

@cache
def sizes(*shape): return core.constexpr(prod(shape)), core.tuple([core.constexpr(n) for n in shape])


def tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = sizes(*(type.shape if type.is_block() else ()))


@cache
def fields(element_ty, *shape, init=core.block_type.__init__):
    block = object.__new__(core.block_type)
    init(block, element_ty, list(shape))
    return vars(block)


def block_type(self, element_ty, shape): vars(self).update(fields(element_ty, *map(unwrap, getattr(shape, "values", shape))))


@cache
def holds(kind): return issubclass(kind, (list, tuple, core.tuple, core.constexpr))


def unwrap(o, slowly=core._unwrap_if_constexpr): return slowly(o) if holds(type(o)) else o


def broadcast(self, a, b, slowly=I.TritonSemantic.broadcast_impl_value):
    alike = a.type.shape.values == b.type.shape.values if a.type.is_block() and b.type.is_block() else not (a.type.is_block() or b.type.is_block())
    return (a, b) if alike else slowly(self, a, b)


slowly = cache(I._get_np_dtype)
def np_dtype(t): return slowly(t.element_ty if t.is_block() else t)


I.GridExecutor.__call__, I.InterpretedFunction.__call__, I.ReduceOps.apply_impl = launch, device_function, reduce
I.interpreter_builder.options = replace(I.interpreter_builder.options, sanitize_overflow=False)
I._patch_builtin, core.tensor.__init__, core.block_type.__init__, I._get_np_dtype = patch, tensor, block_type, np_dtype
core._unwrap_if_constexpr, I.TritonSemantic.broadcast_impl_value = unwrap, broadcast
