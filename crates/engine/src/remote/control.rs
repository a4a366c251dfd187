//! The control connection of a link, for protocols that need one, such as an NVMe admin queue.
//!
//! ```text
//!   connect ▶ ControlLink ▶ ready ▶ connect ▶ session
//! ```
//! The control connection belongs to its link and runs on the link's core. If the control
//! connection is lost, the session is closed; if the session ends, the control connection is
//! closed. See decision 14.

use crate::carrier::Carrier;
use crate::carrier::connection::{Broken, Connection, Inflow};
use crate::core::reactor::Progress;
use crate::net::host::Host;
use blockmux_proto::driver::session::{Control, StreamSession};

/// A control session with its connection.
pub(super) struct ControlLink<C, H: Host> {
    pub(super) connection: Connection<H>,
    pub(super) session: C,
}

impl<C: Control + StreamSession, H: Host> ControlLink<C, H> {
    pub(super) fn new(connection: Connection<H>, session: C) -> ControlLink<C, H> {
        ControlLink { connection, session }
    }

    /// Queries the path's state again, because the session has found that it changed. Send errors
    /// appear in the next turn.
    pub(super) fn refresh_path(&mut self) {
        self.session.query_path_rank();
        let _ = self.connection.send(&mut self.session);
    }

    /// Receives and sends.
    #[inline]
    pub(super) fn turn(&mut self) -> Result<Progress, Broken> {
        self.connection.check_deadline(&mut self.session)?;
        let inflow = self.connection.receive(&mut self.session)?;
        self.connection.send(&mut self.session)?;
        match inflow {
            Inflow::Finished => {
                let error = std::io::Error::other("the controller closed its admin queue");
                Err(Broken::Socket(error))
            }
            Inflow::More => Ok(Progress::More),
            Inflow::Drained => Ok(Progress::Drained),
            Inflow::Empty | Inflow::Blocked => Ok(Progress::Idle),
        }
    }

    /// Logs out, best effort.
    pub(super) fn end(&mut self) {
        self.session.on_stop();
        let _ = self.connection.send(&mut self.session);
        self.connection.say_goodbye(&mut self.session);
    }
}
