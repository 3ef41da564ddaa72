//! Prometheus's text format, of any number of processes, and a server for it that knows one page.
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use super::page::State;
use crate::failure::Failure;
use crate::prof::{Analysis, name_of};

/// Figures that only go up; the others are states.
const TOTALS: [&str; 14] = [
    "rseq_aborts",
    "purge_calls",
    "purge_us",
    "purge_failures",
    "purged_bytes",
    "regretted_bytes",
    "pressure_bytes",
    "huge_splits",
    "collapsed_bytes",
    "collapse_failures",
    "collapse_us",
    "prof_blocks",
    "prof_missed",
    "prof_samples",
];

fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

pub(super) fn text(states: Vec<State>) -> Result<String, Failure> {
    // A metric's lines have to stand together, so by metric first.
    let mut metrics: std::collections::BTreeMap<String, Vec<String>> = Default::default();
    for state in states {
        let who =
            format!("pid=\"{}\",program=\"{}\"", state.profile.pid, label(&state.profile.program));
        let alive = u8::from(state.alive);
        metrics.entry("thermalloc_up".to_owned()).or_default().push(format!("{{{who}}} {alive}"));
        for (name, value) in &state.profile.last()?.stats {
            let suffix = if TOTALS.contains(&name.as_str()) { "_total" } else { "" };
            let lines = metrics.entry(format!("thermalloc_{name}{suffix}")).or_default();
            lines.push(format!("{{{who}}} {value}"));
        }
        for pool in &state.profile.last()?.pools {
            for (state, bytes) in [
                ("live", pool.live),
                ("free", pool.free),
                ("pending", pool.pending),
                ("held", pool.held),
            ] {
                let lines = metrics.entry(format!("thermalloc_pool_{state}_bytes")).or_default();
                lines.push(format!("{{{who},pool=\"{}\"}} {bytes}", label(pool.name.trim_start())));
            }
        }
        let a = Analysis::of(state.profile, None, false)?;
        for (component, bytes) in a.totals_by_component()? {
            let lines = metrics.entry("thermalloc_component_bytes".to_owned()).or_default();
            lines.push(format!("{{{who},component=\"{}\"}} {bytes}", name_of(component)));
        }
    }
    let mut text = String::new();
    for (name, lines) in metrics {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        for line in lines {
            let _ = writeln!(text, "{name}{line}");
        }
    }
    Ok(text)
}

/// Answers every request with the figures, one after the other.
pub(super) fn serve(
    address: &str,
    text: impl Fn() -> Result<String, Failure>,
) -> Result<(), Failure> {
    let listener = TcpListener::bind(address)
        .map_err(|why| Failure::cannot_run(address, why, "name another address by --serve"))?;
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        // A client that says nothing must not keep others waiting.
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        let _ = stream.set_write_timeout(Some(Duration::from_secs(2)));
        let _ = stream.read(&mut [0; 4096]);
        let (status, body) = match text() {
            Ok(body) => ("200 OK", body),
            Err(failure) => ("503 Service Unavailable", format!("{failure}\n")),
        };
        let _ = write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            body.len()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::page::{Page, tests::made};
    use super::*;

    #[test]
    fn lines_of_a_metric_stand_together() {
        let paths = [made("thermalloc-prom-a", 5), made("thermalloc-prom-b", 6)];
        let states = paths.iter().map(|path| Page::open(path).unwrap().read().unwrap()).collect();
        let text = text(states).unwrap();
        paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        let at = |line: &str| {
            let found = text.lines().position(|other| other == line);
            found.unwrap_or_else(|| panic!("no line {line} in\n{text}"))
        };
        let head = at("# TYPE thermalloc_allocated_bytes gauge");
        let who = |pid: u32| format!("{{pid=\"{pid}\",program=\"/bin/server\"}}");
        assert_eq!(at(&format!("thermalloc_allocated_bytes{} 5242880", who(5))), head + 1);
        assert_eq!(at(&format!("thermalloc_allocated_bytes{} 5242880", who(6))), head + 2);
        at(
            "thermalloc_component_bytes{pid=\"5\",program=\"/bin/server\",component=\"weights\"} 3000000",
        );
        at(
            "thermalloc_pool_held_bytes{pid=\"6\",program=\"/bin/server\",pool=\"device 1 kv\"} 5368709120",
        );
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.contains("{pid=") && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
