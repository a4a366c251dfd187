//! What a core runs.

/// What a task has achieved in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It did something and has more to do: run it again soon.
    More,
    /// It did something, and all there was.
    Drained,
    /// It found nothing to do.
    Idle,
    /// It has ended: drop it.
    Done,
}

/// Something that a core runs. It never blocks; whatever it waits for wakes it.
pub trait Task {
    /// Does what there is to do now, within bounds, so that others get their turn.
    fn run(&mut self) -> Progress;

    /// Whether [`Task::run`] looks at a socket, so that running it over and over finds new work. It
    /// is parked before the core stops doing so.
    fn is_polled(&self) -> bool {
        false
    }

    /// Nobody will run this task unless it is woken: it asks the ring to tell of its sockets.
    fn park(&mut self) {}
}
