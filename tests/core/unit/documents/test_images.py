"""Images are decoded by threads, and change nothing that other threads see."""

import io
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.documents.images import image_of_bytes

Pillow = pytest.importorskip("PIL.Image")


def test_decoding_in_threads_leaves_the_warnings_of_others() -> None:
    stream = io.BytesIO()
    Pillow.new("RGBA", (64, 64)).save(stream, "PNG")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(8) as threads:
            warnings.simplefilter("always")
            list(threads.map(image_of_bytes, [stream.getvalue()] * 400))
            warnings.warn("another's", UserWarning, stacklevel=1)
            warnings.warn_explicit("of Pillow", UserWarning, "Image.py", 1, module="PIL.Image")
    finally:
        sys.setswitchinterval(interval)
    assert [str(each.message) for each in caught] == ["another's"]
