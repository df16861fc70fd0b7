#!/bin/sh
# Print a root file system of Debian's C library and shell as a tar archive: enough for Java.
# For a machine that reaches its Debian packages and no image registry. Needs apt-get and dpkg-deb.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p root/usr/bin root/usr/sbin root/usr/lib root/usr/lib64 root/tmp
chmod 1777 root/tmp
for folder in bin sbin lib lib64; do ln -s usr/$folder root/$folder; done
apt-get download -qq libc6 libgcc-s1 dash >&2
for package in *.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C root
done
tar -c --owner=0 --group=0 -C root .
