"""thermalloc for Python programs: run on it, profile on it, and say what memory is for."""

from ._library import library, loaded, tool
from .profile import ProfileError, Summary, dump, profile, report
from .scopes import captured, mark, mark_module, mark_optimizer, scope, step
from .watch import watch

__all__ = [
    "ProfileError",
    "Summary",
    "captured",
    "dump",
    "library",
    "loaded",
    "mark",
    "mark_module",
    "mark_optimizer",
    "profile",
    "report",
    "scope",
    "step",
    "tool",
    "watch",
]
