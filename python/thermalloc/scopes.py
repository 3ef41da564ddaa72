"""Scopes: what memory is for, said by the program."""

import contextvars
import functools

from . import _library


class scope:
    """What this thread allocates within belongs to a scope; as a decorator, what the function does.

    A name that is a component's, or begins with one before a colon or a slash, assigns the memory:
    weights, activations, gradients, optimizer, kv_cache, workspace, framework, python, loader, other.

    >>> with scope("weights:encoder"):
    ...     table = bytearray(1 << 20)
    """

    def __init__(self, name):
        self.name = name
        self._before = []

    def __enter__(self):
        self._before.append(_library.call("thermalloc_scope_push", self.name.encode()))
        return self

    def __exit__(self, *_):
        before = self._before.pop()
        if before is not None:
            _library.call("thermalloc_scope_pop", before)

    def __call__(self, function):
        @functools.wraps(function)
        def within(*arguments, **named):
            with scope(self.name):
                return function(*arguments, **named)

        return within


class captured:
    """The scope that this thread is in, to hand to another one: `with captured_scope: ...`."""

    def __init__(self):
        self._token = _library.call("thermalloc_scope_capture")
        self._before = contextvars.ContextVar("thermalloc_scope")

    def __enter__(self):
        if self._token is not None:
            self._before.set(_library.call("thermalloc_scope_attach", self._token))
        return self

    def __exit__(self, *_):
        if self._token is not None:
            _library.call("thermalloc_scope_pop", self._before.get())


def step(number):
    """Says that a step of the work begins: a batch, a request."""
    _library.call("thermalloc_scope_step", number)


def mark(address, name):
    """Gives a live block, by its address, another scope. Whether it was a recorded one."""
    with scope(name):
        token = _library.call("thermalloc_scope_capture")
        return bool(token and _library.call("thermalloc_scope_mark", address, token))


def mark_module(module, name="weights"):
    """Marks the parameters and buffers of a PyTorch module, and gradients. How many blocks were recorded ones."""
    marked = 0
    for kept_name, kept in [*module.named_parameters(), *module.named_buffers()]:
        marked += _mark_tensor(kept, f"{name}:{kept_name}")
        if kept.grad is not None:
            marked += _mark_tensor(kept.grad, f"gradients:{kept_name}")
    return marked


def mark_optimizer(optimizer):
    """Marks the state of a PyTorch optimizer. How many blocks were recorded ones."""
    marked = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if hasattr(value, "untyped_storage"):
                marked += _mark_tensor(value, f"optimizer:{name}")
    return marked


def _mark_tensor(tensor, name):
    # Sparse tensors and those on the meta device have no block of their own.
    if tensor.is_sparse or tensor.is_meta:
        return False
    return mark(tensor.untyped_storage().data_ptr(), name)
