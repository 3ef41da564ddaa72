//! `thermalloc stats`: the figures of live processes, once.
use std::io::Write as _;

use clap::Args;
use serde_json::{Value, json};

use super::page::{self, Page, State};
use super::prometheus;
use crate::failure::Failure;
use crate::prof::{Analysis, Table, name_of, size};

/// Print the statistics of live processes.
///
/// They have to be started with the option stats_page (docs/profiler.md).
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Processes [default: all that have a page in /dev/shm]
    #[arg(value_name = "PID")]
    pids: Vec<u32>,

    /// In Prometheus's text format
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,

    /// Serve that format by HTTP at this address, as in 127.0.0.1:9188, until interrupted
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["json", "dump"])]
    serve: Option<String>,

    /// Write JSON
    #[arg(long)]
    json: bool,

    /// Have each process write a dump, named by its option prof_prefix
    #[arg(long)]
    dump: bool,
}

/// The pages that the command line names, or all.
fn pages(pids: &[u32]) -> Result<Vec<Page>, Failure> {
    if pids.is_empty() {
        return Ok(page::all());
    }
    pids.iter().map(|&pid| Page::of(pid)).collect()
}

pub(crate) fn stats(options: &Options) -> Result<(), Failure> {
    if let Some(address) = &options.serve {
        return prometheus::serve(address, || text_of(&options.pids));
    }
    let pages = pages(&options.pids)?;
    if pages.is_empty() {
        return Err(Failure::not_found(
            "processes",
            "none has a statistics page in /dev/shm",
            "start one with THERMALLOC_CONF=stats_page:/dev/shm/thermalloc.%p",
        ));
    }
    if options.dump {
        return pages.iter().try_for_each(Page::request_dump);
    }
    let mut text = String::new();
    let mut all = Vec::new();
    for page in &pages {
        let state = page.read()?;
        if options.json {
            all.push(to_json(&state)?);
        } else if options.prometheus {
            all.push(Value::Null);
        } else {
            text += &tables(state)?;
        }
    }
    if options.json {
        text = format!("{:#}\n", Value::Array(all));
    } else if options.prometheus {
        text = text_of(&options.pids)?;
    }
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn text_of(pids: &[u32]) -> Result<String, Failure> {
    let states: Vec<State> = pages(pids)?.iter().filter_map(|page| page.read().ok()).collect();
    prometheus::text(states)
}

fn to_json(state: &State) -> Result<Value, Failure> {
    let last = state.profile.last()?;
    let pools: Vec<Value> = last
        .pools
        .iter()
        .map(|pool| {
            json!({
                "name": pool.name.trim_start(), "threads": pool.threads, "live_bytes": pool.live,
                "pending_bytes": pool.pending, "free_bytes": pool.free, "held_bytes": pool.held,
                "peak_bytes": (pool.peak > 0).then_some(pool.peak),
            })
        })
        .collect();
    Ok(json!({
        "pid": state.profile.pid, "program": state.profile.program, "alive": state.alive,
        "age_s": state.age, "stats": last.stats, "pools": pools,
    }))
}

fn tables(state: State) -> Result<String, Failure> {
    let mut text = format!(
        "{} (process {}{}), {:.1} s ago\n",
        state.profile.program,
        state.profile.pid,
        if state.alive { "" } else { ", gone" },
        state.age
    );
    let mut table = Table::new(&["statistic", ">value"]);
    for (name, value) in &state.profile.last()?.stats {
        let value = if name.ends_with("_bytes") { size(*value) } else { value.to_string() };
        table.row([name.clone(), value]);
    }
    text += &table.text();
    let pools = &state.profile.last()?.pools;
    if !pools.is_empty() {
        text += "\n";
        let mut table =
            Table::new(&["arena or pool", ">live", ">free", ">pending", ">has", ">threads"]);
        for p in pools {
            let cells = [p.live, p.free, p.pending, p.held].map(size);
            let [live, free, pending, held] = cells;
            table.row([p.name.clone(), live, free, pending, held, p.threads.to_string()]);
        }
        text += &table.text();
    }
    let a = Analysis::of(state.profile, None, false)?;
    let components = a.totals_by_component()?;
    if !components.is_empty() {
        text += "\n";
        let mut table = Table::new(&["component", ">live"]);
        for (component, bytes) in components {
            table.row([name_of(component).to_owned(), size(bytes)]);
        }
        text += &table.text();
    }
    Ok(text + "\n")
}
