"""PyTorch, whose tensors say nothing of themselves: hooks tell the profiler what they are."""

import threading

from . import _library
from .scopes import mark, mark_module, mark_optimizer, step


class watch:
    """Follows the training or inference of a PyTorch module until `remove()` or the end of a `with`.

    Parameters and buffers are weights, their gradients are gradients as soon as they are accumulated, and the
    optimizer's state is known after its step, which also counts as a step of the work. What a layer
    allocates in its forward pass has the layer's name as its scope.

    >>> with watch(model, optimizer):
    ...     train()
    """

    def __init__(self, module, optimizer=None):
        self._hooks, self._steps, self._states = [], 0, 0
        # Requests are served by many threads.
        self._of_thread = threading.local()
        # Without the allocator there is nobody to tell.
        if _library.loaded():
            mark_module(module)
            self._watch_gradients(module)
            self._watch_layers(module)
            if optimizer is not None:
                self._watch_optimizer(optimizer)

    def _watch_gradients(self, module):
        for name, parameter in module.named_parameters():
            # Versions before 2.1 lack it: gradients are then told by the call stack.
            register = getattr(parameter, "register_post_accumulate_grad_hook", None)
            if register is not None and parameter.requires_grad:
                self._hooks.append(register(self._gradient_hook(f"gradients:{name}")))

    @staticmethod
    def _gradient_hook(scope):
        def hook(parameter):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                mark(parameter.grad.untyped_storage().data_ptr(), scope)

        return hook

    def _watch_layers(self, module):
        for name, layer in module.named_modules():
            if name:
                self._hooks.append(layer.register_forward_pre_hook(self._enter_hook(name)))
                self._hooks.append(self._register_leave(layer))

    def _enter_hook(self, name):
        # The name of a component would be one.
        scope = f"layer {name}".encode()

        def enter(layer, _):
            self._entered().append((layer, _library.call("thermalloc_scope_push", scope)))

        return enter

    def _register_leave(self, layer):
        try:
            return layer.register_forward_hook(self._leave, always_call=True)
        except TypeError:  # before 2.1
            return layer.register_forward_hook(self._leave)

    def _leave(self, layer, *_):
        # Layers within it that raised are left with it.
        entered = self._entered()
        while entered:
            of, before = entered.pop()
            _library.call("thermalloc_scope_pop", before)
            if of is layer:
                return

    def _entered(self):
        if not hasattr(self._of_thread, "layers"):
            self._of_thread.layers = []
        return self._of_thread.layers

    def _watch_optimizer(self, optimizer):
        self._hooks.append(optimizer.register_step_post_hook(self._stepped))
        self._stepped(optimizer)

    def _stepped(self, optimizer, *_):
        states = len(optimizer.state)
        if states != self._states:
            self._states = states
            mark_optimizer(optimizer)
        self._steps += 1
        step(self._steps)

    def remove(self):
        """Removes the hooks; what was said stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()
