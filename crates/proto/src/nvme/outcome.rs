//! How commands end.

use blockmux_volume::SgList;
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvme::status::{Status, StatusField};

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) status: StatusField,
    /// DW0 and DW1 of the completion.
    pub(crate) result: u64,
    /// For the host.
    pub(crate) data: SgList,
}

impl Outcome {
    /// Success without data.
    #[inline]
    pub(crate) fn success(result: u64) -> Outcome {
        Outcome::data(SgList::default(), result)
    }

    /// Success with data.
    #[inline]
    pub(crate) fn data(data: SgList, result: u64) -> Outcome {
        Outcome { status: StatusField::new(Status::SUCCESSFUL_COMPLETION), result, data }
    }

    /// A failure that will be the same again.
    pub(crate) fn failure(status: impl Into<Status>) -> Outcome {
        Outcome { status: StatusField::final_one(status.into()), result: 0, data: SgList::default() }
    }

    /// The end of a command that was not begun: where only the path is wrong, another try may find a better one.
    pub(crate) fn refusal(status: Status) -> Outcome {
        const PATH: u16 = 3;
        if status.0 >> 8 == PATH { Outcome::retry(status) } else { Outcome::failure(status) }
    }

    /// A failure that may not be the same again.
    pub(crate) fn retry(status: Status) -> Outcome {
        Outcome { status: StatusField::new(status), result: 0, data: SgList::default() }
    }

    /// The completion of the command with that CID. `sqhd` is `None` where SQ flow control is disabled.
    #[inline]
    pub(crate) fn cqe(&self, cid: u16, sqhd: Option<u16>) -> Cqe {
        Cqe {
            result: self.result.into(),
            sqhd: sqhd.unwrap_or(u16::MAX).into(),
            sqid: 0.into(),
            cid: cid.into(),
            status: self.status,
        }
    }
}
