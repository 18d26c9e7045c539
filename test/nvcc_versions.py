#!/usr/bin/env python3
"""Compiles toka_kernels.cu for Hopper with other CUDA toolkits than the installed one, and checks that no kernel spills registers.

    test/nvcc_versions.py [--recorded] [VERSION...]      default: 12.4 12.6 12.8 12.9 13.1 13.3

A version takes about ten minutes. A good result is noted in test/results/nvcc-versions.tsv with the hash of toka_kernels.cu. With
--recorded, a version is not compiled again if its result for the present toka_kernels.cu is noted there; other changes of toka.h
than of comments need a run without it.

The toolkits come from the Python package index. It has the whole compiler from 13.0 on. Of 12.x it has only the assembler, ptxas,
which allocates the registers. So for 12.x the installed nvcc makes PTX with NVCC_VERSION set to that version, the version of the PTX
language is replaced by the one that this ptxas knows, and ptxas compiles it. This does not find missing parts of 12.x's headers.
Prints one line per version. The exit status is 1 if a version failed, 3 if a version is not available.
"""
import datetime
import glob
import hashlib
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "test", ".build", "nvcc")
PTX = {"12.4": "8.4", "12.5": "8.5", "12.6": "8.5", "12.8": "8.7", "12.9": "8.8"}  # toolkit: its version of the PTX language
RECORD = os.path.join(ROOT, "test", "results", "nvcc-versions.tsv")  # version, kernels, date, hash
BUILD = ["-std=c++20", "-O3", "-Xcompiler", "-fno-exceptions"]
BAD = re.compile(r"C75\d\d|[1-9]\d* bytes spill")  # the same pattern as in build.sh


def run(*command, **more):
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def fetch(version, packages):
    """The folder of a version's packages; None if the index lacks a package or cannot be reached."""
    folder = os.path.join(WORK, version)
    if not os.path.isdir(folder):
        got = run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder + ".part", *packages)
        if got.returncode:
            print(got.stdout, end="")
            return None
        os.rename(folder + ".part", folder)
    return folder


def assemble(version):
    """Compiles with the ptxas of a version; None: not available."""
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
    """Compiles with the nvcc of a version; None: not available."""
    names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    folder = fetch(version, [f"{name}=={version}.*" for name in names])
    if not folder:
        return None
    bins = os.path.join(glob.glob(os.path.join(folder, "nvidia/cu1*"))[0], "bin")
    return run(os.path.join(bins, "nvcc"), *BUILD, "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c", "toka_kernels.cu",
               "-o", os.devnull, env={**os.environ, "PATH": bins + os.pathsep + os.environ["PATH"]})


def read_record():
    """version: [number of kernels, date, hash] of the last good results."""
    if not os.path.exists(RECORD):
        return {}
    with open(RECORD) as f:
        return {fields[0]: fields[1:] for fields in (line.split() for line in f if not line.startswith("#"))}


def note(version, n, kernels):
    record = {**read_record(), version: [str(n), str(datetime.date.today()), kernels]}
    with open(RECORD, "w") as f:
        f.write("# test/nvcc_versions.py: toolkit, kernels that compile without spills for sm_90a, date, sha256 of toka_kernels.cu\n")
        f.writelines("\t".join([version, *record[version]]) + "\n" for version in sorted(record))


def check(version, kernels):
    """Compiles with a version, prints the result and notes it if it is good. Returns the exit status."""
    made = assemble(version) if version.startswith("12.") else compile_all(version)
    if made is None:
        print(f"{version}: not available")
        return 3
    lines = made.stdout.splitlines()
    bad = [f"  {at}: {line.strip()}" for at, line in zip([""] + lines, lines) if BAD.search(line)]
    n = sum("Compiling entry function" in line for line in lines)
    good = not made.returncode and not bad and n > 0
    print(f"{version}: {'ok' if good else 'FAIL'}, {n} kernels", flush=True)
    if not good:
        print("\n".join(bad or lines[-20:]))
        return 1
    note(version, n, kernels)
    return 0


def main(versions, recorded):
    with open(os.path.join(ROOT, "toka_kernels.cu"), "rb") as f:
        kernels = hashlib.sha256(f.read()).hexdigest()
    statuses = []
    for version in versions:
        n, date, known = read_record().get(version, ["", "", ""])
        if recorded and known == kernels:
            print(f"{version}: ok, {n} kernels, compiled on {date} from the same toka_kernels.cu")
        else:
            statuses.append(check(version, kernels))
    return 1 if 1 in statuses else max(statuses, default=0)


if __name__ == "__main__":
    args = sys.argv[1:]
    sys.exit(main([arg for arg in args if arg != "--recorded"] or ["12.4", "12.6", "12.8", "12.9", "13.1", "13.3"], "--recorded" in args))
