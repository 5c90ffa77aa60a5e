"""Tests of joined pages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.content.joined import JoinedPages
from infinity.content.layout import Layout
from infinity.content.views import component_of
from support.layouts import layouts


@given(st.data())
def test_sections_of_joined_pages_are_contiguous(data: st.DataObject) -> None:
    """They contain the items of all pages, in order."""
    layout: Layout = data.draw(layouts(most=20_000))
    segment = data.draw(st.sampled_from(layout.segments))
    pages = [*segment.update_pages, *segment.param_pages]
    first = data.draw(st.integers(0, max(0, len(pages) - 1)))
    pages = pages[first : data.draw(st.integers(first, len(pages)))]
    contents = {page.index: memoryview(bytearray(torch.randint(256, (page.nbytes,)).byte().numpy())) for page in pages}
    joined = JoinedPages(layout, pages)
    memory = torch.zeros(joined.nbytes, dtype=torch.uint8)
    for array, part in zip(joined.arrays, memory.split_with_sizes(joined.sizes), strict=True):
        if array.page >= 0:
            part.copy_(torch.frombuffer(contents[array.page], dtype=torch.uint8)[array.offset :][: array.nbytes])
    for whole, begin, end in joined.pages:
        members = [page for page in pages if page.role is whole.role and whole.start <= page.start < whole.stop]
        for component in {c for section in segment.format.components.values() for c in section if c.role is whole.role}:
            found = component_of(memory[begin:end], whole, component, whole.start, whole.stop)
            parts = [component_of(contents[page.index], page, component, page.start, page.stop) for page in members]
            assert found.view(torch.uint8).equal(torch.cat(parts).view(torch.uint8))
