#!/usr/bin/env bash
# Becomes the surroundings of a Slurm site that a test makes: two users, Slurm's own cgroups, and the
# program under test where everybody can read it. Run in fresh mount and cgroup name spaces; prints a
# line when all is there, and stays until its standard input ends.
# slurm_site.sh DIRECTORY REPOSITORY SITE_PACKAGES USER=UID ...
set -euo pipefail
directory=$1 repository=$2 packages=$3
shift 3

mount --make-rprivate /
for each in etc cgroup/freezer repository packages; do mkdir -p "$directory/$each"; done
cp /etc/passwd /etc/group "$directory/etc"
for each; do
    user=${each%=*} uid=${each#*=}
    echo "$user:x:$uid:$uid::$directory:/bin/sh" >>"$directory/etc/passwd"
    echo "$user:x:$uid:" >>"$directory/etc/group"
done
for each in passwd group; do mount --bind "$directory/etc/$each" "/etc/$each"; done
# Of this name space's own: nobody else's Slurm can be met in it.
mount -t cgroup -o freezer cgroup "$directory/cgroup/freezer"
mount --bind "$repository" "$directory/repository"
mount --bind "$packages" "$directory/packages"
echo ready
cat
