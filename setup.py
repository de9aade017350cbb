"""Build the compiled kernels; pyproject.toml has everything else."""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

OPENMP = "-fopenmp"


class BuildKernels(build_ext):
    """Build without OpenMP where the compiler has none, such as Apple's clang (parallel.h)."""

    def build_extension(self, ext: Extension) -> None:
        """Build with OpenMP, or else without it."""
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args = [flag for flag in ext.extra_compile_args if flag != OPENMP]
            ext.extra_link_args = [flag for flag in ext.extra_link_args if flag != OPENMP]
            super().build_extension(ext)


setup(cmdclass={"build_ext": BuildKernels})
