//! Runs all cases repeatedly until all runs are complete, one fails, or a signal arrives.
//!
//! A separate thread measures, and the caller's thread collects the results. An interrupt does not
//! wait for the current run: the complete runs are reported, and the current one ends with the
//! process.

use super::case::BenchCase;
use super::plan::BenchPlan;
use crate::failure::Failure;
use crate::process::signals;
use blockmux_engine::remote::missing_connections;
use blockmux_lab::figure::{count, title};
use blockmux_lab::job::Job;
use blockmux_lab::pattern::shuffled;
use blockmux_lab::result::{Row, Run};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt;
use std::io::{self, IsTerminal, Write as _};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracing::{info, warn};

/// Results of the measurement.
pub(super) struct Measured {
    /// The rows of all cases in order, with their complete runs.
    pub(super) rows: Vec<Row>,
    /// Number of runs that ended with a lost connection.
    pub(super) lost_connection: u32,
    /// Reason for the end.
    pub(super) end: BenchEnd,
}

impl Measured {
    /// Without the rows that an early end has left without runs. Where all runs are complete, a row
    /// without any stays: `skipped` has the reason.
    pub(super) fn without_unmeasured_rows(mut self) -> Measured {
        if !matches!(self.end, BenchEnd::Complete) {
            self.rows.retain(|row| !row.runs.is_empty());
        }
        self
    }
}

/// Reason for the end of the measurement.
pub(super) enum BenchEnd {
    /// All runs are complete.
    Complete,
    /// This signal arrived.
    Signal(i32),
    /// A run failed.
    Failed(Failure),
}

/// Events of the measuring thread and of signals.
pub(super) enum BenchEvent {
    /// A run is complete; `case` is the index of its row.
    Run { case: usize, run: Box<Run>, is_short_of_one: bool },
    /// The measurement ends.
    End(BenchEnd),
}

/// Receives signals that end the bench early.
pub(super) struct Interrupts {
    events: Sender<BenchEvent>,
    incoming: Receiver<BenchEvent>,
}

impl Interrupts {
    /// Starts to receive signals; called first, so that none is lost.
    ///
    /// # Errors
    /// If the signal handlers cannot be installed.
    pub(super) fn watch() -> Result<Interrupts, Failure> {
        let (events, incoming) = mpsc::channel();
        signals::watch(&events, &[], |signal| BenchEvent::End(BenchEnd::Signal(signal)))
            .map_err(|error| Failure::run(format!("cannot install signal handlers: {error}")))?;
        Ok(Interrupts { events, incoming })
    }
}

/// Runs every case `runs` times, interleaved.
///
/// # Errors
/// If the measurement cannot start.
pub(super) fn measure(plan: BenchPlan, runs: u32, interrupts: Interrupts) -> Result<Measured, Failure> {
    let rows: Vec<Row> = plan.cases.iter().map(BenchCase::row).collect();
    let bar = progress_bar(&plan, runs);
    let its_bar = bar.clone();
    let work = move |events: &Sender<BenchEvent>| run_all(&plan, runs, &its_bar, events);
    collect(rows, interrupts, &bar, work).map(|(measured, _)| measured)
}

/// Measures on a separate thread, and collects the runs in `rows` until it ends or a signal
/// arrives. Then the thread may still be in a run.
///
/// # Errors
/// If the thread cannot be started.
pub(super) fn collect(
    mut rows: Vec<Row>,
    interrupts: Interrupts,
    bar: &ProgressBar,
    work: impl FnOnce(&Sender<BenchEvent>) -> Result<(), Failure> + Send + 'static,
) -> Result<(Measured, JoinHandle<()>), Failure> {
    let Interrupts { events, incoming } = interrupts;
    let thread = thread::Builder::new().name("bench".to_owned()).spawn(move || {
        let end = work(&events).map_or_else(BenchEnd::Failed, |()| BenchEnd::Complete);
        // The receiver may have ended.
        let _ = events.send(BenchEvent::End(end));
    });
    let thread = thread.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    let mut lost_connection = 0;
    let end = loop {
        match incoming.recv() {
            Ok(BenchEvent::Run { case, run, is_short_of_one }) => {
                lost_connection += u32::from(is_short_of_one);
                rows[case].runs.push(*run);
            }
            Ok(BenchEvent::End(end)) => break end,
            Err(_) => break BenchEnd::Failed(Failure::run("the measuring thread has panicked")),
        }
    };
    bar.finish_and_clear();
    // A run that continues must not draw over the output.
    bar.set_draw_target(ProgressDrawTarget::hidden());
    Ok((Measured { rows, lost_connection, end }, thread))
}

fn run_all(
    plan: &BenchPlan,
    runs: u32,
    bar: &ProgressBar,
    events: &Sender<BenchEvent>,
) -> Result<(), Failure> {
    plan.prepare(bar)?;
    bar.reset_elapsed();
    let mut done_ms = 0;
    // Without a terminal, progress is one line per finished job.
    let prints_lines = !io::stderr().is_terminal();
    for nth in 1..=runs {
        let order = order(&plan.cases, nth);
        for (place, &at) in order.iter().enumerate() {
            let case = &plan.cases[at];
            bar.set_message(format!("run {nth}/{runs}: {}, {}", case.configuration(), case.job.name));
            let case_ms = case.job.ramp_time_ms + case.job.runtime_ms;
            let missing = missing_connections();
            let run = case.run(plan, &|share| bar.set_position(done_ms + (share * case_ms as f64) as u64))?;
            done_ms += case_ms;
            bar.set_position(done_ms);
            let iops = count(run.iops());
            let is_short_of_one = missing_connections() > missing;
            if is_short_of_one {
                let (configuration, job) = (case.configuration(), &case.job.name);
                warn!(
                    "run {nth}/{runs} of {configuration}, {job}: a connection was lost and could not be restored"
                );
            }
            if events.send(BenchEvent::Run { case: at, run: Box::new(run), is_short_of_one }).is_err() {
                return Ok(());
            }
            info!("run {nth}/{runs} of {}, {}: {iops} IOPS", case.configuration(), case.job.name);
            let is_last = order.get(place + 1).is_none_or(|&next| plan.cases[next].job != case.job);
            if prints_lines && is_last {
                print_finished(nth, runs, &case.job, (done_ms, bar.length().unwrap_or(0)));
            }
        }
    }
    Ok(())
}

/// Prints that run `nth` of a job is finished, with the progress and remaining time of the bench.
fn print_finished(nth: u32, runs: u32, job: &Job, (done_ms, all_ms): (u64, u64)) {
    let percent = done_ms * 100 / all_ms.max(1);
    let left = HumanDuration(Duration::from_millis(all_ms.saturating_sub(done_ms)));
    // A closed standard error does not end the bench.
    let _ = writeln!(io::stderr(), "{percent:>3}%, {left:#} left; run {nth}/{runs} finished: {}", title(job));
}

/// The order of `cases` in run `nth`, as indices: jobs in order, since some read what earlier ones
/// wrote, and the cases of each job shuffled. A CPU that has been idle wakes at a different speed
/// than a busy one, so a fixed order would favor some cases.
fn order(cases: &[BenchCase], nth: u32) -> Vec<usize> {
    let mut order = Vec::with_capacity(cases.len());
    for of_one_job in cases.chunk_by(|a, b| a.job == b.job) {
        let first = order.len();
        order.extend(shuffled(of_one_job.len(), u64::from(nth)).iter().map(|place| first + place));
    }
    order
}

fn progress_bar(plan: &BenchPlan, runs: u32) -> ProgressBar {
    let case_ms: u64 = plan.cases.iter().map(|case| case.job.ramp_time_ms + case.job.runtime_ms).sum();
    let bar = ProgressBar::with_draw_target(
        Some(case_ms * u64::from(runs)),
        ProgressDrawTarget::stderr_with_hz(10),
    );
    // The duration of runs is configured, so the remaining time is exact.
    let left = |state: &ProgressState, text: &mut dyn fmt::Write| {
        let left_ms = state.len().unwrap_or(0).saturating_sub(state.pos());
        let _ = write!(text, "{:#}", HumanDuration(Duration::from_millis(left_ms)));
    };
    let style = ProgressStyle::with_template("{bar:24} {percent:>3}%, {left} left; {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("left", left));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_lab::result::ConfigurationKind;

    #[test]
    fn rows_without_runs_stay_unless_the_bench_ends_early() {
        let row = |runs: usize| Row {
            configuration: "aoe, 1 Gbit/s, MTU 1500".to_owned(),
            kind: ConfigurationKind::Protocol,
            protocol: "aoe".to_owned(),
            target: "mem:1g".to_owned(),
            poll: String::new(),
            job: Job::default(),
            report: 0,
            runs: vec![Run::default(); runs],
        };
        let shown = |end| {
            let measured = Measured { rows: vec![row(0), row(1)], lost_connection: 0, end };
            measured.without_unmeasured_rows().rows.len()
        };
        assert_eq!((shown(BenchEnd::Complete), shown(BenchEnd::Signal(2))), (2, 1));
    }
}
