"""Every CUDA source compiled by NVRTC, as at run time, for each architecture, without a GPU."""

import ctypes
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from cuda_on_cpu import CSRC
from cuda_on_cpu.kernel_names import KERNELS
from support import nightly_but

# the oldest: what it takes, the others take
ARCHITECTURES = nightly_but((75,), (75, 80, 90, 100, 120))
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="the extra 'test' brings NVRTC for Linux only"
)


class Nvrtc:
    """The compiler of the package nvidia-cuda-nvrtc, with nvidia-cuda-runtime's headers."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(installed("nvidia-cuda-nvrtc", r"/libnvrtc\.so[.\d]*$")))
        self._headers = installed("nvidia-cuda-runtime", r"/cuda_fp16\.h$").parent

    def compile(self, name: str, text: str, architecture: int) -> tuple[bytes, str]:
        """Return the machine code and what the compiler and the assembler report."""
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), *encoded(text, name), 0, None, None)
        options = encoded(
            *(f"--gpu-architecture=sm_{architecture}", "--std=c++17", "--fmad=false"),
            *(f"-I{CSRC}", f"-I{self._headers}", "--ptxas-options=-v"),
        )
        array = (ctypes.c_char_p * len(options))(*options)
        failed = self._library.nvrtcCompileProgram(program, len(options), array)
        log = self._read("ProgramLog", program).rstrip(b"\0").decode()
        assert not failed, log
        return self._read("CUBIN", program), log

    def _call(self, function: str, *arguments: object) -> None:
        assert self._library[f"nvrtc{function}"](*arguments) == 0, function

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw


def encoded(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def installed(distribution: str, pattern: str) -> Path:
    """Return the path of a file that a package installed."""
    files = importlib.metadata.files(distribution) or []
    return next(Path(str(file.locate())) for file in files if re.search(pattern, str(file)))


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def kernels_in(machine_code: bytes) -> list[str]:
    """Return the names of the sections of code."""
    return sorted({name.decode() for name in re.findall(rb"\0\.text\.(\w+)", machine_code)})


def stack_frames(log: str) -> list[int]:
    """Return the bytes of each function's stack frame, in which spilled registers lie, too."""
    return [int(size) for size in re.findall(r"(\d+) bytes stack frame", log)]


def test_each_source_is_listed() -> None:
    assert set(KERNELS) == {path.name for path in CSRC.glob("*.cu")}


@linux_only
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_nvrtc_makes_every_kernel_and_spills_no_register(
    nvrtc: Nvrtc, source: str, architecture: int
) -> None:
    text = (CSRC / source).read_text(encoding="utf-8")
    machine_code, log = nvrtc.compile(source, text, architecture)
    assert kernels_in(machine_code) == sorted(KERNELS[source])
    assert "warning" not in log
    frames = stack_frames(log)
    assert len(frames) >= len(KERNELS[source])
    assert not any(frames), log


@linux_only
def test_a_template_that_nobody_instantiates_is_missed(nvrtc: Nvrtc) -> None:
    text = (CSRC / "cast.cu").read_text(encoding="utf-8")
    without = text.replace("AMP_FOR_EACH_PAIR(MAKE_CAST)", "MAKE_CAST(float16, float32)")
    assert kernels_in(nvrtc.compile("cast.cu", without, 90)[0]) == ["cast_float16_to_float32"]


@linux_only
def test_a_stack_frame_is_seen(nvrtc: Nvrtc) -> None:
    text = """extern "C" __global__ void kernel(int* p) {
        int numbers[64];
        for (int i = 0; i < 64; ++i) numbers[i] = p[i];
        for (int i = 0; i < 64; ++i) p[i] = numbers[p[i] % 64];
    }"""
    assert stack_frames(nvrtc.compile("kernel.cu", text, 90)[1]) == [256]


@linux_only
def test_an_error_is_reported_with_the_compilers_words(nvrtc: Nvrtc) -> None:
    with pytest.raises(AssertionError, match=r'broken.cu\(1\): error: .*"nothing" is undefined'):
        nvrtc.compile("broken.cu", "__global__ void kernel() { nothing; }", 90)
