//! `prof compare`: two runs side by side, by component and by call site. Addresses differ between runs, so
//! sites are matched by the names on their stacks.
use std::collections::{BTreeMap, HashMap};

use serde_json::json;

use super::Output;
use super::analysis::{Analysis, At, Sum, name_of, shorten};
use super::table::{Table, bytes, percent};
use crate::failure::Failure;

pub(crate) fn report(
    old: &Analysis,
    new: &Analysis,
    at: At,
    top: usize,
) -> Result<Output, Failure> {
    let (before, after) = (old.at(at)?, new.at(at)?);
    let mut text = format!(
        "{} (process {}): {}\n{} (process {}): {}\n\n",
        old.profile.program,
        old.profile.pid,
        before.what,
        new.profile.program,
        new.profile.pid,
        after.what
    );
    let mut components: BTreeMap<u8, [Sum; 2]> = BTreeMap::new();
    for (side, (a, instant)) in [(old, &before), (new, &after)].into_iter().enumerate() {
        for (component, sum, _) in a.by_component(instant) {
            components.entry(component).or_default()[side] = sum;
        }
    }
    let mut table = Table::new(&["component", ">before", ">after", ">change", ">+-", ">relative"]);
    let mut total = [Sum::default(); 2];
    let mut rows: Vec<(String, [Sum; 2])> = Vec::new();
    for (component, sums) in &components {
        total.iter_mut().zip(sums).for_each(|(total, sum)| total.merge(sum));
        rows.push((name_of(*component).to_owned(), *sums));
    }
    rows.push(("in all".to_owned(), total));
    for (name, sums) in &rows {
        table.row(cells(name, sums));
    }
    text += &table.text();
    let mut sites: HashMap<String, [Sum; 2]> = HashMap::new();
    for (side, (a, instant)) in [(old, &before), (new, &after)].into_iter().enumerate() {
        for (site, sum) in a.by_site(instant) {
            sites.entry(a.names(site).join("\n")).or_default()[side].merge(&sum);
        }
    }
    let change = |sums: &[Sum; 2]| sums[1].bytes - sums[0].bytes;
    let mut sites: Vec<(String, [Sum; 2])> = sites.into_iter().collect();
    sites.sort_by(|a, b| change(&b.1).abs().total_cmp(&change(&a.1).abs()).then(a.0.cmp(&b.0)));
    text += "\n";
    let mut table = Table::new(&[">before", ">after", ">change", ">+-", "call site"]);
    for (stack, sums) in sites.iter().take(top) {
        let line: Vec<String> = stack.lines().take(3).map(shorten).collect();
        let [_, before, after, change, error, _] = cells("", sums);
        table.row([before, after, change, error, line.join(" < ")]);
    }
    text += &table.text();
    let of = |sums: &[Sum; 2]| json!({ "before_bytes": sums[0].bytes, "after_bytes": sums[1].bytes, "error_bytes": error(sums) });
    let json = json!({
        "components": rows.iter().map(|(name, sums)| (name.clone(), of(sums))).collect::<serde_json::Map<_, _>>(),
        "sites": sites.iter().take(500).map(|(stack, sums)| json!({ "stack": stack.lines().collect::<Vec<_>>(), "bytes": of(sums) })).collect::<Vec<_>>(),
    });
    Ok(Output { text, json, picture: None })
}

fn error(sums: &[Sum; 2]) -> f64 {
    (sums[0].variance + sums[1].variance).max(0.0).sqrt()
}

fn cells(name: &str, sums: &[Sum; 2]) -> [String; 6] {
    let change = sums[1].bytes - sums[0].bytes;
    [
        name.to_owned(),
        bytes(sums[0].bytes),
        bytes(sums[1].bytes),
        if change > 0.0 { format!("+{}", bytes(change)) } else { bytes(change) },
        bytes(error(sums)),
        percent(change, sums[0].bytes),
    ]
}
