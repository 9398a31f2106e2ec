"""Values that graph options may be given."""

from hypothesis import strategies as st

from bridge_cg_plugin.options.language_model import MODULE_NAMES

texts = st.one_of(
    st.text(max_size=20),
    st.text("attnmlpoefu_i,[] =.:-{}\n\"'<>0123456789", max_size=30),
    st.lists(st.sampled_from([*MODULE_NAMES, "full", "full_iteration", "none", "local", ""]), max_size=3).map(",".join),
)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.lists(texts, max_size=3))
modules = st.lists(st.sampled_from([*MODULE_NAMES, "full_iteration", "full_iteration_inference"]), max_size=3)
