import re
from pathlib import Path

import pytest

from score_centering.runs import peak_rss_bytes


def test_the_peak_is_the_kernel_s_in_bytes():
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert peak_rss_bytes() == pytest.approx(1024 * kib, rel=0.01)
