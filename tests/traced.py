"""Which of upstream's functions run in a call, seen by `sys.monitoring`."""

import sys
from types import CodeType

PACKAGES = ("megatron.", "transformer_engine.", "transformers.", "torch.nn.modules.", "torch.nn.functional")
TOOL = 3


def functions_run(call) -> set[tuple[str, str]]:
    """Return the `place` of each function of upstream that runs in a call."""
    seen: set[CodeType] = set()

    def started(code, offset):
        seen.add(code)
        return sys.monitoring.DISABLE

    events = sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(TOOL, "functions_run")
    try:
        sys.monitoring.register_callback(TOOL, events, started)
        sys.monitoring.restart_events()
        sys.monitoring.set_events(TOOL, events)
        call()
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    places = {place(code, modules) for code in seen if code.co_filename in modules}
    return {(module, name) for module, name in places if module.startswith(PACKAGES)}


def place(code: CodeType, modules: dict[str, str]) -> tuple[str, str]:
    """Return a code's module, by its file, and the qualified name of the outermost function around it."""
    return modules.get(code.co_filename, ""), code.co_qualname.partition(".<locals>")[0]
