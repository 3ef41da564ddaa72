//! `thermalloc top`: a process's memory as it changes.
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table};
use ratatui::{Frame, Terminal};

use super::page::{Page, State};
use crate::failure::Failure;
use crate::prof::{Analysis, Pool, bytes, count, float, name_of, size};

/// Watch a process: components, call sites, the allocator's pages, faults. Keys: q ends, d has it write a dump.
///
/// It has to be started with the option stats_page (docs/profiler.md).
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,

    /// Milliseconds between looks
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..))]
    every_ms: u64,

    /// Print one look as text, and end
    #[arg(long)]
    once: bool,
}

/// What is shown.
#[derive(Debug, Default)]
struct View {
    title: String,
    figures: Vec<(String, String)>,
    components: Vec<(String, u64)>,
    pools: Vec<Pool>,
    sites: Vec<[String; 4]>,
    resident: VecDeque<u64>,
    note: String,
    faults: Option<(u64, Instant)>,
}

/// Looks that the curve has.
const HISTORY: usize = 240;

pub(crate) fn top(options: &Options) -> Result<(), Failure> {
    let page = Page::of(options.pid)?;
    let mut view = View::default();
    if options.once {
        view.look(page.read()?)?;
        return print(&view);
    }
    let mut terminal = ratatui::try_init()
        .map_err(|why| Failure::cannot_run("terminal", why, "use --once where there is none"))?;
    let result = watch(options, &page, &mut view, &mut terminal);
    ratatui::restore();
    result
}

fn watch<B: ratatui::backend::Backend>(
    options: &Options,
    page: &Page,
    view: &mut View,
    terminal: &mut Terminal<B>,
) -> Result<(), Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::cannot_run("terminal", why, "use --once");
    loop {
        match page.read() {
            Ok(state) => view.look(state)?,
            Err(failure) => view.note = failure.to_string(),
        }
        terminal.draw(|frame| view.draw(frame)).map_err(|_| failed(&"it can't be drawn to"))?;
        let until = Instant::now() + Duration::from_millis(options.every_ms);
        while let Some(rest) = until.checked_duration_since(Instant::now()) {
            if !event::poll(rest).map_err(|why| failed(&why))? {
                break;
            }
            let Event::Key(key) = event::read().map_err(|why| failed(&why))? else { continue };
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(event::KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                KeyCode::Char('d') => {
                    view.note = match page.request_dump() {
                        Ok(()) => "asked for a dump".to_owned(),
                        Err(failure) => failure.to_string(),
                    };
                }
                _ => {}
            }
        }
    }
}

fn print(view: &View) -> Result<(), Failure> {
    let backend = ratatui::backend::TestBackend::new(120, 48);
    let mut terminal = match Terminal::new(backend) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    match terminal.draw(|frame| view.draw(frame)) {
        Ok(_) => {}
        Err(never) => match never {},
    }
    let text = screen(terminal.backend().buffer());
    let _ = io::Write::write_all(&mut io::stdout(), text.as_bytes());
    Ok(())
}

/// A screen as lines of text.
fn screen(buffer: &ratatui::buffer::Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let mut text = String::new();
    for row in buffer.content.chunks(width) {
        let line: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Minor and major faults of a process so far.
fn faults(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may have anything in it, so from behind its bracket.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(number(7)? + number(9)?)
}

/// Pools and all arenas together first, then by what they have; the slabs of CPUs last.
fn by_size(mut pools: Vec<Pool>) -> Vec<Pool> {
    pools.sort_by_key(|pool| (pool.name.starts_with(' '), std::cmp::Reverse(pool.held)));
    pools
}

impl View {
    /// Takes in a state.
    fn look(&mut self, state: State) -> Result<(), Failure> {
        let last = state.profile.last()?.clone();
        let kernel = last.system.map_or(0, |system| system.resident_bytes);
        self.title = format!(
            "{} ({}){}",
            state.profile.program,
            state.profile.pid,
            match (state.alive, state.age) {
                (false, _) => "  GONE".to_owned(),
                (true, age) if age > 3.0 => format!("  nothing new for {age:.0} s"),
                _ => String::new(),
            }
        );
        let now = faults(state.profile.pid);
        let rate = match (now, self.faults) {
            (Some(now), Some((before, when))) => {
                float(now.saturating_sub(before)) / when.elapsed().as_secs_f64().max(1e-3)
            }
            _ => 0.0,
        };
        self.faults = now.map(|now| (now, Instant::now()));
        let stat = |name: &str| last.stat(name);
        self.figures = vec![
            ("resident".to_owned(), size(kernel)),
            ("live".to_owned(), size(stat("allocated_bytes"))),
            ("active".to_owned(), size(stat("active_bytes"))),
            (
                "dirty, warm".to_owned(),
                format!("{}, {}", size(stat("dirty_bytes")), size(stat("warm_bytes"))),
            ),
            ("in caches".to_owned(), size(stat("cached_bytes"))),
            ("tables".to_owned(), size(stat("metadata_bytes"))),
            ("huge pages".to_owned(), size(stat("huge_bytes"))),
            ("purged".to_owned(), size(stat("purged_bytes"))),
            ("slabs".to_owned(), count(float(stat("slabs")))),
            ("faults a second".to_owned(), count(rate)),
            ("samples".to_owned(), count(float(stat("prof_blocks")))),
        ];
        self.resident.push_back(if kernel > 0 { kernel } else { stat("resident_bytes") } >> 10);
        if self.resident.len() > HISTORY {
            self.resident.pop_front();
        }
        self.pools = by_size(last.pools);
        let a = Analysis::of(state.profile, None, false)?;
        let names = a.totals_by_component()?;
        self.components = names.into_iter().map(|(c, sum)| (name_of(c).to_owned(), sum)).collect();
        let mut totals = last.totals;
        totals.sort_by(|a, b| b.weighted_live_bytes.total_cmp(&a.weighted_live_bytes));
        self.sites = totals
            .iter()
            .take(40)
            .map(|t| {
                let what = a.tag(t.tag);
                let what = if what.is_empty() { String::new() } else { format!("[{what}] ") };
                [
                    bytes(t.weighted_live_bytes),
                    count(t.weighted_live_blocks),
                    name_of(a.components.of_pair(t.site, t.tag)).to_owned(),
                    what + &a.line(t.site, 3),
                ]
            })
            .collect();
        Ok(())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let rows = [
            Constraint::Length(1),
            Constraint::Length(6),
            Constraint::Length(13),
            Constraint::Length(self.pool_lines(frame.area().height)),
            Constraint::Min(4),
            Constraint::Length(1),
        ];
        let [title, curve, middle, pools, sites, foot] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Line::from(self.title.as_str()).bold(), title);
        let most = self.resident.iter().max().copied().unwrap_or(0);
        let data: Vec<u64> = self.resident.iter().copied().collect();
        let curve_title = format!(" resident, at most {} ", size(most << 10));
        frame.render_widget(
            Sparkline::default()
                .block(Block::bordered().title(curve_title))
                .data(&data)
                .style(Style::new().fg(Color::Cyan)),
            curve,
        );
        let halves = [Constraint::Length(44), Constraint::Min(20)];
        let [left, right] = Layout::horizontal(halves).areas(middle);
        self.draw_figures(frame, left);
        self.draw_components(frame, right);
        self.draw_pools(frame, pools);
        let rows = self.sites.iter().map(|cells| Row::new(cells.iter().map(String::as_str)));
        let widths = [
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(12),
            Constraint::Min(20),
        ];
        frame.render_widget(
            Table::new(rows, widths)
                .header(Row::new(["live", "blocks", "component", "call site"]).bold())
                .block(Block::bordered().title(" call sites ")),
            sites,
        );
        let keys = format!(" q ends  d dumps  {}", self.note);
        frame.render_widget(Paragraph::new(keys).style(Style::new().fg(Color::DarkGray)), foot);
    }

    /// What the arenas and pools have room for: call sites come first.
    fn pool_lines(&self, height: u16) -> u16 {
        const FRAME_AND_HEAD: u16 = 3;
        let wanted = u16::try_from(self.pools.len()).unwrap_or(u16::MAX).min(8) + FRAME_AND_HEAD;
        let room = height.saturating_sub(32);
        if room > FRAME_AND_HEAD { wanted.min(room) } else { 0 }
    }

    fn draw_pools(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.pools.iter().map(|pool| {
            let or_not = |number: u64, text: String| if number > 0 { text } else { String::new() };
            Row::new([
                pool.name.clone(),
                size(pool.live),
                size(pool.free),
                or_not(pool.pending, size(pool.pending)),
                size(pool.held),
                or_not(pool.peak, size(pool.peak)),
                or_not(pool.threads.into(), pool.threads.to_string()),
            ])
        });
        let widths = [
            Constraint::Length(30),
            Constraint::Length(11),
            Constraint::Length(11),
            Constraint::Length(11),
            Constraint::Length(11),
            Constraint::Length(11),
            Constraint::Min(7),
        ];
        let head = ["arena or pool", "live", "free", "pending", "has", "had at most", "threads"];
        let block = Block::bordered().title(" arenas and device pools ");
        frame.render_widget(
            Table::new(rows, widths).header(Row::new(head).bold()).block(block),
            area,
        );
    }

    fn draw_figures(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows =
            self.figures.iter().map(|(name, value)| Row::new([name.as_str(), value.as_str()]));
        let widths = [Constraint::Length(16), Constraint::Min(10)];
        let block = Block::bordered().title(" allocator ");
        frame.render_widget(Table::new(rows, widths).block(block), area);
    }

    fn draw_components(&self, frame: &mut Frame<'_>, area: Rect) {
        let most = self.components.iter().map(|row| row.1).max().unwrap_or(1).max(1);
        let room = u64::from(area.width.saturating_sub(28));
        let rows = self.components.iter().map(|(name, sum)| {
            let cells = usize::try_from(sum * room / most).unwrap_or(0);
            Row::new([name.clone(), size(*sum), "#".repeat(cells)])
        });
        let widths = [Constraint::Length(12), Constraint::Length(10), Constraint::Min(4)];
        let block = Block::bordered().title(" components ");
        frame.render_widget(Table::new(rows, widths).block(block), area);
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::tests::made;
    use super::*;

    #[test]
    fn the_screen_has_what_the_page_says() {
        let path = made("thermalloc-top-test", u32::MAX - 1);
        let page = Page::open(&path).unwrap();
        let mut view = View::default();
        view.look(page.read().unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut terminal = Terminal::new(ratatui::backend::TestBackend::new(100, 42)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let text = screen(terminal.backend().buffer());
        for part in [
            "/bin/server (4294967294)  GONE",
            "resident, at most 11.0 MiB",
            "active           8.0 MiB",
            "weights      2.9 MiB",
            "[encoder] 0x1000",
            "arenas of CPUs                 5.0 MiB     3.0 MiB                 8.0 MiB",
            "device 1 kv                    3.0 GiB     1.0 GiB     512 MiB     5.0 GiB     6.0 GiB",
            "arena 9 loader                 2.0 MiB     0 B                     2.0 MiB                 3",
            "q ends  d dumps",
        ] {
            assert!(text.contains(part), "no {part:?} on\n{text}");
        }
    }

    #[test]
    fn a_small_terminal_is_no_panic() {
        for (width, height) in [(1, 1), (20, 5), (300, 100)] {
            let mut terminal =
                Terminal::new(ratatui::backend::TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| View::default().draw(frame)).unwrap();
        }
    }
}
