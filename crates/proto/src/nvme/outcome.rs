//! Outcomes of commands.

use blockmux_volume::SgList;
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvme::status::{NvmeStatus, StatusField};

/// The outcome of a command.
#[derive(Clone, Debug)]
pub struct NvmeOutcome {
    pub(crate) status: StatusField,
    /// Dwords 0 and 1 of the completion.
    pub(crate) result: u64,
    /// Data for the host.
    pub(crate) data: SgList,
}

impl NvmeOutcome {
    /// Success without data.
    #[inline]
    pub(crate) fn success(result: u64) -> NvmeOutcome {
        NvmeOutcome::data(SgList::default(), result)
    }

    /// Success with data.
    #[inline]
    pub(crate) fn data(data: SgList, result: u64) -> NvmeOutcome {
        NvmeOutcome { status: StatusField::new(NvmeStatus::SUCCESSFUL_COMPLETION), result, data }
    }

    /// A permanent failure: DNR is set.
    pub(crate) fn failure(status: impl Into<NvmeStatus>) -> NvmeOutcome {
        NvmeOutcome { status: StatusField::final_one(status.into()), result: 0, data: SgList::default() }
    }

    /// The failure of a command that was not begun: with DNR, except for path-related status, where
    /// another path may succeed.
    pub(crate) fn refusal(status: NvmeStatus) -> NvmeOutcome {
        const PATH: u16 = 3;
        if status.0 >> 8 == PATH { NvmeOutcome::retry(status) } else { NvmeOutcome::failure(status) }
    }

    /// A transient failure: DNR is not set.
    pub(crate) fn retry(status: NvmeStatus) -> NvmeOutcome {
        NvmeOutcome { status: StatusField::new(status), result: 0, data: SgList::default() }
    }

    /// The completion of the command with this CID. `sqhd` is `None` if SQ flow control is
    /// disabled.
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
