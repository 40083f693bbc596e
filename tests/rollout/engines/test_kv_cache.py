import torch

from primerl.rollout.engines.transformers.kv_cache import LayerShape, PagedCache
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, Page
from primerl.rollout.engines.transformers.scheduler import PageCopy

CPU = torch.device("cpu")


def shape(window=None):
    return LayerShape(
        heads=2, key_size=3, value_size=2, dtype=torch.float32, device=CPU, window=window
    )


def test_pages_are_copied_as_if_one_after_another():
    cache = PagedCache([shape(), shape(window=5)], device=CPU, pages=4, windowed_pages=4)
    for layer in cache.layers:
        layer.copy_(torch.rand(layer.shape, generator=torch.Generator().manual_seed(0)))
    before = [layer.view(2, -1, PAGE_TOKENS, 5).clone() for layer in cache.layers]
    one = Page(index=1, window_index=3)
    two = Page(index=2, window_index=1)
    three = Page(index=4, window_index=4)

    cache.copy([PageCopy(one, two, 20), PageCopy(two, three, 25)])

    after = [layer.view(2, -1, PAGE_TOKENS, 5) for layer in cache.layers]
    for layer, (first, second, third) in ((0, (1, 2, 4)), (1, (3, 1, 4))):
        old, new = before[layer], after[layer]
        assert torch.equal(new[:, second, :20], old[:, first, :20])
        assert torch.equal(new[:, second, 20:], old[:, second, 20:])
        assert torch.equal(new[:, third, :20], old[:, first, :20])
        assert torch.equal(new[:, third, 20:25], old[:, second, 20:25])
        assert torch.equal(new[:, third, 25:], old[:, third, 25:])
        others = [page for page in range(5) if page not in (second, third)]
        assert torch.equal(new[:, others], old[:, others])
