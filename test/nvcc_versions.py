#!/usr/bin/env python3
"""Does toka_kernels.cu compile for Hopper, without spills, with other toolkits than the one that is installed?

    test/nvcc_versions.py [VERSION...]      12.4 12.6 12.8 12.9 13.1 13.3 unless named

They come from the Python package index. From 13.0 on it has the whole compiler. Of 12.x it has the assembler, ptxas, which gives out
the registers: it gets the PTX that the installed nvcc makes of the source as that version would see it (NVCC_VERSION), said to be
of the version's own language. What 12.x's headers lack is not found so. A line a version; exit 1 if one failed, 3 if one could not
be had.
"""
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "test", ".build", "nvcc")
PTX = {"12.4": "8.4", "12.5": "8.5", "12.6": "8.5", "12.8": "8.7", "12.9": "8.8"}  # the language that a version knows
BUILD = ["-std=c++20", "-O3", "-Xcompiler", "-fno-exceptions"]
BAD = re.compile(r"C75\d\d|[1-9]\d* bytes spill")  # as build.sh has it


def run(*command, **more):
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def fetch(version, packages):
    """The folder of a version's packages; None if the index has not all of them, or is out of reach."""
    folder = os.path.join(WORK, version)
    if not os.path.isdir(folder):
        got = run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder + ".part", *packages)
        if got.returncode:
            print(got.stdout, end="")
            return None
        os.rename(folder + ".part", folder)
    return folder


def assemble(version):
    """By the version's ptxas; None: not to be had."""
    folder = fetch(version, [f"nvidia-cuda-nvcc-cu12=={version}.*"])
    if not folder:
        return None
    ptxas, ptx = os.path.join(folder, "nvidia/cuda_nvcc/bin/ptxas"), os.path.join(folder, "kernels.ptx")
    major, minor = version.split(".")
    made = run("nvcc", *BUILD[:2], "-arch=compute_90a", f"-DNVCC_VERSION={int(major) * 100 + int(minor)}", "-ptx", "-o", ptx,
               "toka_kernels.cu")
    if made.returncode:
        return made
    with open(ptx) as f:
        text = re.sub(r"^\.version .*$", ".version " + PTX[version], f.read(), count=1, flags=re.M)
    with open(ptx, "w") as f:
        f.write(text)
    os.chmod(ptxas, 0o755)
    return run(ptxas, "-v", "-arch=sm_90a", ptx, "-o", os.devnull)


def compile_all(version):
    """By the version's nvcc; None: not to be had."""
    names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    folder = fetch(version, [f"{name}=={version}.*" for name in names])
    if not folder:
        return None
    bins = os.path.join(glob.glob(os.path.join(folder, "nvidia/cu1*"))[0], "bin")
    return run(os.path.join(bins, "nvcc"), *BUILD, "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c", "toka_kernels.cu",
               "-o", os.devnull, env={**os.environ, "PATH": bins + os.pathsep + os.environ["PATH"]})


def main(versions):
    status = 0
    for version in versions:
        made = assemble(version) if version.startswith("12.") else compile_all(version)
        if made is None:
            print(f"{version}: cannot be had")
            status = status or 3
            continue
        lines = made.stdout.splitlines()
        bad = [f"  {at}: {line.strip()}" for at, line in zip([""] + lines, lines) if BAD.search(line)]
        n = sum("Compiling entry function" in line for line in lines)
        good = not made.returncode and not bad and n > 0
        print(f"{version}: {'ok' if good else 'FAIL'}, {n} kernels", flush=True)
        if not good:
            print("\n".join(bad or lines[-20:]))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["12.4", "12.6", "12.8", "12.9", "13.1", "13.3"]))
