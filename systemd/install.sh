#!/usr/bin/env bash
# Installs tsliced from the wheels that lie beside this script; needs no network. May be repeated.
# What is running goes on with the version that it began with, until it is restarted.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: install.sh [--prefix DIR] [--destdir DIR] [--python FILE] [--uninstall]

  --prefix DIR     where programs go (default: /usr/local)
  --destdir DIR    write below DIR and start nothing, to make a package of it
  --python FILE    Python 3.11 or later that runs the daemon (default: /usr/bin/python3)
  --uninstall      take away what was installed; configuration and state stay
TEXT
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix=/usr/local destdir='' python=/usr/bin/python3 uninstall=
while (($#)); do
    case $1 in
    --prefix | --destdir | --python)
        (($# > 1)) || fail "$1 needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --uninstall) uninstall=1 && shift ;;
    --help | -h) usage && exit ;;
    *) usage >&2 && exit 64 ;;
    esac
done
[[ $prefix == /* ]] || fail "--prefix must be an absolute path: $prefix"
destdir=${destdir%/}
[[ -z $destdir || $destdir == /* ]] || fail "--destdir must be an absolute path: $destdir"

# systemd looks below /usr/lib and /usr/local/lib, wherever the programs are.
vendor=/usr/local/lib
[[ $prefix == /usr ]] && vendor=/usr/lib
lib=$prefix/lib/tsliced
etc=/etc/tsliced
programs=(tsliced tslicectl cuda-ckpt)

# Whether there is a systemd here that is to know of it.
live() {
    [[ -z $destdir && -d /run/systemd/system ]] && ((EUID == 0))
}

remove() {
    if live; then
        systemctl disable --quiet --now tsliced.socket tsliced.service 2>/dev/null || true
    fi
    rm -f "$destdir$vendor"/systemd/system/tsliced.{service,socket} \
        "$destdir$vendor"/{sysusers.d,tmpfiles.d}/tsliced.conf "${programs[@]/#/$destdir$prefix/bin/}"
    rm -rf "$destdir$lib"
    if live; then systemctl daemon-reload; fi
    echo "tsliced is removed; $etc and /var/lib/tsliced are left"
}

check_python() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$python is no Python 3.11 or later; name one with --python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; on Debian: apt-get install python3-venv"
    case $(realpath "$("$python" -c 'import sys; print(sys._base_executable)')") in
    /home/* | /root/* | /run/user/*)
        fail "$python lies in a home directory, which the daemon's sandbox does not show to it"
        ;;
    esac
}

# Makes the virtual environment of this version, and prints its name.
make_environment() {
    local id venv wheels=("$here"/wheels/*.whl)
    [[ -e ${wheels[0]} ]] || fail "there are no wheels in $here/wheels"
    id=$(cd "$here/wheels" && echo tsliced-*.whl | cut -d- -f2)
    id+=-$( ("$python" -VV && cd "$here/wheels" && sha256sum -- *.whl) | sha256sum | head -c 8)
    venv=$destdir$lib/$id
    if [[ ! -e $venv/complete ]]; then
        rm -rf "$venv"
        "$python" -m venv "$venv" >&2
        "$venv/bin/python" -m pip -qq --disable-pip-version-check --no-cache-dir install \
            --no-index --find-links "$here/wheels" 'tsliced[daemon]' >&2 ||
            fail "pip could not install the wheels; they are for one version of Python: $(ls "$here/wheels")"
        if [[ -n $destdir ]]; then
            # Scripts name their interpreter by its path.
            grep -rlIF "$destdir" "$venv/bin" "$venv/pyvenv.cfg" | xargs -r sed -i "s|$destdir||g"
        fi
        touch "$venv/complete"
    fi
    echo "$id"
}

# Makes a version the current one; the one before stays for who runs it still.
switch_to() {
    local id=$1 root=$destdir$lib before='' each
    before=$(readlink "$root/current" || true)
    ln -sfn "$id" "$root/current.new"
    mv -Tf "$root/current.new" "$root/current"
    if [[ -n $before && $before != "$id" ]]; then ln -sfn "$before" "$root/previous"; fi
    for each in "$root"/*/; do
        each=$(basename "$each")
        case $each in
        current | previous | slurm | "$id" | "$(readlink "$root/previous" || true)") ;;
        *) rm -rf "${root:?}/$each" ;;
        esac
    done
}

# Installs the configuration, unless somebody has changed it.
install_config() {
    local sample=$here/systemd/tsliced.toml file=$destdir$etc/tsliced.toml known=$destdir$lib/tsliced.toml
    install -d -m 755 "$destdir$etc/tsliced.toml.d"
    if [[ ! -e $file ]] || cmp -s "$file" "$known"; then
        install -m 644 "$sample" "$file"
        rm -f "$file.dist"
    elif ! cmp -s "$file" "$sample"; then
        install -m 644 "$sample" "$file.dist"
        echo "$etc/tsliced.toml is yours and stays; this version's is beside it: tsliced.toml.dist"
    fi
    install -m 644 "$sample" "$known"
}

if [[ -z $destdir ]] && ((EUID)); then
    fail 'only root can install into the system; --destdir DIR writes it all below DIR'
fi
if [[ -n $uninstall ]]; then
    remove
    exit
fi
check_python
umask 022
id=$(make_environment)
switch_to "$id"
install -d "$destdir$prefix/bin" "$destdir$vendor"/{systemd/system,sysusers.d,tmpfiles.d}
for program in "${programs[@]}"; do
    ln -sfn "../lib/tsliced/current/bin/$program" "$destdir$prefix/bin/$program"
done
# Hooks and snippets for Slurm; docs/slurm.md says what to do with them.
install -d "$destdir$lib/slurm"
install -m 755 "$here"/systemd/slurm/* "$destdir$lib/slurm/"
sed "s|@LIBDIR@|$lib|" "$here/systemd/tsliced.service" >"$destdir$vendor/systemd/system/tsliced.service"
install -m 644 "$here/systemd/tsliced.socket" "$destdir$vendor/systemd/system/"
install -m 644 "$here/systemd/sysusers.conf" "$destdir$vendor/sysusers.d/tsliced.conf"
install -m 644 "$here/systemd/tmpfiles.conf" "$destdir$vendor/tmpfiles.d/tsliced.conf"
install_config
if live; then
    systemd-sysusers "$vendor/sysusers.d/tsliced.conf"
    systemd-tmpfiles --create "$vendor/tmpfiles.d/tsliced.conf"
    systemctl daemon-reload
fi
echo "tsliced $id is installed in $prefix"
if live && systemctl --quiet is-active tsliced.service; then
    echo 'an earlier version is running; jobs do not notice: systemctl restart tsliced'
else
    echo 'to start it now and at each boot: systemctl enable --now tsliced.socket tsliced.service'
fi
