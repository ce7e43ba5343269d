#!/usr/bin/env bash
# Becomes the first process of a box: a systemd of its own on a copy of this machine's root file
# system, whose changes are in memory and gone with it. Run in fresh name spaces; see box.py.
# box_init.sh DIRECTORY [HOST_PATH=BOX_PATH ...]: the paths are shown in the box, read-only.
set -euo pipefail
directory=$1
shift
root=$directory/root

mount --make-rprivate /
mount -t tmpfs -o size=3g,mode=755 tmpfs "$directory"
mkdir "$directory"/{changes,work,root}
mount -t overlay overlay -o lowerdir=/,upperdir="$directory/changes",workdir="$directory/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for each in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$each"; done
chmod 1777 "$root/tmp"
for each in null zero full random urandom tty fuse; do
    [[ -e /dev/$each ]] || continue
    touch "$root/dev/$each"
    mount --bind "/dev/$each" "$root/dev/$each"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for each; do
    mkdir -p "$root${each#*=}"
    mount --rbind "${each%%=*}" "$root${each#*=}"
    mount -o remount,bind,ro "$root${each#*=}"
done

# Only what the tests need is started: journald, dbus and what they stand on.
units=$root/etc/systemd/system
mkdir -p "$units"
find "$units" -mindepth 1 -delete
cat >"$units/box.target" <<'TEXT'
[Unit]
Requires=basic.target
After=basic.target
AllowIsolate=yes
TEXT
ln -s box.target "$units/default.target"
for each in systemd-{remount-fs,udevd,udev-trigger,modules-load,sysctl,timesyncd,networkd,resolved}.service \
    sys-{kernel-debug,kernel-tracing,kernel-config,fs-fuse-connections}.mount dev-{hugepages,mqueue}.mount \
    timers.target paths.target swap.target; do
    ln -s /dev/null "$units/$each"
done
: >"$root/etc/fstab"
echo box >"$root/etc/hostname"
rm -f "$root/etc/machine-id"
hostname box

cd "$root"
mkdir -p old
pivot_root . old
cd /
umount -l /old
exec env -i container=box PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --show-status=false --log-target=console --log-level=warning \
    systemd.unified_cgroup_hierarchy=1
