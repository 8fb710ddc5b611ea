# Installs what a check lacks, on Debian and its like. Sourced by the other scripts:
#
#     source .ci/apt.sh
#
# Without root there is nothing to be installed, and apt-get says so.

# apt_install PACKAGE...
apt_install() {
    printf '\n==> apt-get install %s\n' "$*"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

# need COMMAND PACKAGE...: installs the packages if the command is missing.
need() {
    local command=$1
    shift
    command -v "$command" >/dev/null || apt_install "$@"
}

# need_venv: python3 can make virtual environments; Debian's needs a package of its own for that.
need_venv() {
    python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv
}
