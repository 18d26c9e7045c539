#!/bin/bash
# test/release.sh [FOLDER] - makes FOLDER/toka-VERSION-linux-ARCH.tar.gz of the committed files: sources, README.md, models.txt and
# a static ./toka for CPUs. The same commit, compiler and libc give the same bytes. FOLDER is test/.build if it is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-test/.build}" && cd "${1:-test/.build}" && pwd)
version=$(sed -n 's/^#define TOKA_VERSION "\(.*\)"$/\1/p' toka.h)
name=toka-$version
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
when=$(git log -1 --format=%ct) # no clock: the time of the commit
git archive --prefix="$name/" HEAD toka.c toka.h toka_kernels.cu build.sh models.txt README.md LICENSE test/model test/toka.py test/example.c |
    tar -x -C "$tmp"
# no clone is there: build.sh gets the commit from here
sed -i "s/^commit=.*/commit=$(git rev-parse --short=8 HEAD)/" "$tmp/$name/build.sh"
# -static needs no libc of the machine; the paths of this machine do not enter the program
(cd "$tmp/$name" && NVCC='' SOURCE_DATE_EPOCH=$when CFLAGS="${CFLAGS:-} -ffile-prefix-map=$tmp=." LDFLAGS="-static -Wl,--build-id=none" ./build.sh >&2)
tar --sort=name --mode="u=rwX,go=rX" --mtime="@$when" --owner=0 --group=0 --numeric-owner --format=gnu -C "$tmp" -cf - "$name" |
    gzip -n -9 >"$out/$name-linux-$(uname -m).tar.gz"
(cd "$out" && sha256sum "$name-linux-$(uname -m).tar.gz")
