//! The command as a person runs it: tables, files and complaints.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn lab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_thermalloc-lab")).args(args).output().expect("the command")
}

fn stdout(args: &[&str]) -> String {
    let output = lab(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn path(file: &Path) -> &str {
    file.to_str().expect("a plain path")
}

#[test]
fn a_run_prints_a_row_and_draws_lines_for_each_policy() {
    let (svg, csv) = (file("run.svg"), file("run.csv"));
    let policies = ["thermalloc", "jemalloc", "jemalloc-bg", "tcmalloc", "glibc", "never"];
    let (list, svg_path, csv_path) = (policies.join(","), path(&svg), path(&csv));
    let table = stdout(&[
        "run",
        "--trace",
        "periodic:1000",
        "--policies",
        &list,
        "--svg",
        svg_path,
        "--csv",
        csv_path,
        "--sample-ms",
        "100",
    ]);
    let picture = std::fs::read_to_string(&svg).expect("the picture");
    let samples = std::fs::read_to_string(&csv).expect("the samples");
    let names = samples.lines().next().expect("names");
    for policy in policies {
        let mut rows = table.lines().filter(|row| row.split(' ').next() == Some(policy));
        let row = rows.next().expect("a row");
        let figures: Vec<f64> =
            row.split_whitespace().skip(1).map(|word| word.parse().expect("a number")).collect();
        assert_eq!(figures.len(), 7, "{row}");
        let last = samples.lines().last().expect("a sample");
        let column = names.split(',').position(|name| name == format!("{policy}_faults"));
        let faults = last.split(',').nth(column.expect("its column")).expect("its figure");
        assert_eq!(faults.parse(), Ok(figures[0]), "{policy}");
        let texts = picture.lines().filter(|line| line.trim() == policy).count();
        assert_eq!(texts, 2, "a name in the legend of each panel");
    }
    assert_eq!(samples.lines().count(), 1 + 301, "30 s of samples");
    let lines = picture.matches("<polyline").count();
    assert!(lines > 2 * policies.len(), "{lines} lines");
}

#[test]
fn a_generated_trace_is_replayed_from_its_file_as_by_its_name() {
    let trace = file("idle.trace");
    assert_eq!(stdout(&["generate", "--trace", "idle", "--out", path(&trace)]), "");
    let info = stdout(&["record-info", path(&trace)]);
    assert!(info.contains("lasts             40.000 s\n"), "{info}");
    assert!(info.contains("live at the end   8 blocks, 16.0 MiB\n"), "{info}");
    let from_file = format!("file:{}", path(&trace));
    assert_eq!(
        stdout(&["run", "--trace", &from_file, "--policies", "thermalloc"]),
        stdout(&["run", "--trace", "idle", "--policies", "thermalloc"])
    );
    assert_ne!(
        stdout(&["run", "--trace", "idle", "--policies", "thermalloc"]),
        stdout(&[
            "run",
            "--trace",
            "idle",
            "--policies",
            "thermalloc",
            "--set",
            "hot_window_ms=8000"
        ])
    );
}

#[test]
fn complaints_name_what_is_wrong() {
    for (args, complaint) in [
        (&["run", "--trace", "nonsense"][..], "nonsense: no such trace"),
        (&["run", "--trace", "idle", "--set", "colour=1"], "colour=1: no such option"),
        (&["run", "--trace", "idle", "--policies", "mine"], "no such policy"),
        (&["run", "--trace", "file:/nonexistent"], "/nonexistent: No such file"),
        (&["record-info", "/dev/null"], "/dev/null: line 1: a trace starts with"),
        (
            &["generate", "--trace", "idle", "--out", "/nonexistent/x"],
            "/nonexistent/x: No such file",
        ),
    ] {
        let output = lab(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(complaint), "{args:?}: {stderr}");
    }
}
