//! Properties of a controller, and its states from CC.EN to CSTS.SHST (Base 2.0 §3.1.3, §3.5,
//! §3.6).

use super::MQES;
use super::association::AdminQueueGuard;
use blockmux_wire::nvme::property::{
    CAP, CAP_CQR, CAP_CRMS_CRWMS, CAP_CSS_IOCSS, CAP_CSS_NVM, CAP_TO_SHIFT, CC, CC_AMS_SHIFT, CC_CSS_ADMIN,
    CC_CSS_ALL, CC_CSS_SHIFT, CC_EN, CC_IOCQES_SHIFT, CC_IOSQES_SHIFT, CC_MPS_SHIFT, CC_SHN_SHIFT, CRTO,
    CSTS, CSTS_CFS, CSTS_RDY, CSTS_SHST_COMPLETE, CSTS_SHST_OCCURRING, CSTS_SHST_SHIFT, VS, version,
};
use blockmux_wire::nvme::status::NvmeStatus;

/// The version of the specification that controllers support.
pub(super) const VERSION: u32 = version(2, 0, 0);

/// CC, and the state that follows from it.
#[derive(Default)]
pub(crate) struct Properties {
    cc: u32,
    /// Whether a shutdown was requested since CC.EN was set.
    is_shut: bool,
    /// Whether CC had an unsupported value (CSTS.CFS).
    has_failed: bool,
}

impl Properties {
    /// Whether commands other than Fabrics commands are executed.
    pub(crate) fn is_ready(&self) -> bool {
        self.cc & CC_EN != 0 && !self.is_shut && !self.has_failed
    }

    /// The value of a property of four or eight bytes.
    pub(crate) fn get(&self, place: &AdminQueueGuard, offset: u32, is_long: bool) -> Result<u64, NvmeStatus> {
        match (offset, is_long) {
            (CAP, true) => Ok(CAPABILITIES),
            (VS, false) => Ok(VERSION.into()),
            (CC, false) => Ok(self.cc.into()),
            (CSTS, false) => Ok(self.status(place.has_queues()).into()),
            // The low half, in units of 500 ms.
            (CRTO, false) => Ok(TIMEOUT),
            _ => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
        }
    }

    /// Sets a property; only CC can be set.
    pub(crate) fn set(
        &mut self,
        place: &AdminQueueGuard,
        offset: u32,
        is_long: bool,
        value: u64,
    ) -> Result<(), NvmeStatus> {
        if (offset, is_long) != (CC, false) {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        let (old, new) = (self.cc, value as u32);
        self.cc = new;
        let (was_on, is_on) = (old & CC_EN != 0, new & CC_EN != 0);
        if is_on && !was_on {
            self.is_shut = false;
            self.has_failed = !is_workable(new);
            if !self.has_failed {
                place.enable();
            }
        }
        if !is_on && was_on {
            // A controller reset also clears the shutdown status (Base 2.0 §3.7.2).
            (self.has_failed, self.is_shut) = (false, false);
            place.disable();
        }
        if field(new, CC_SHN_SHIFT, 3) != 0 && field(old, CC_SHN_SHIFT, 3) == 0 {
            self.is_shut = true;
            place.disable();
        }
        Ok(())
    }

    /// The value of CSTS. A queue whose connection was closed may still have I/O in flight; neither
    /// reset nor shutdown completes before that has ended.
    fn status(&self, has_queues: bool) -> u32 {
        let is_on = self.cc & CC_EN != 0;
        let ready = if (is_on || has_queues) && !self.has_failed { CSTS_RDY } else { 0 };
        let failed = if self.has_failed { CSTS_CFS } else { 0 };
        let shutdown = match (self.is_shut, has_queues) {
            (false, _) => 0,
            (true, true) => CSTS_SHST_OCCURRING,
            (true, false) => CSTS_SHST_COMPLETE,
        };
        ready | failed | shutdown << CSTS_SHST_SHIFT
    }
}

/// Whether the controller supports this CC (Base 2.0 figure 46).
fn is_workable(cc: u32) -> bool {
    let css = field(cc, CC_CSS_SHIFT, 7);
    matches!(css, 0 | CC_CSS_ALL | CC_CSS_ADMIN)
        && field(cc, CC_MPS_SHIFT, 15) == 0
        && field(cc, CC_AMS_SHIFT, 7) == 0
        && matches!(field(cc, CC_IOSQES_SHIFT, 15), 0 | 6)
        && matches!(field(cc, CC_IOCQES_SHIFT, 15), 0 | 4)
}

fn field(cc: u32, shift: u32, mask: u32) -> u32 {
    cc.wrapping_shr(shift) & mask
}

/// CAP.TO and CRTO: time until a controller is ready, in units of 500 ms.
const TIMEOUT: u64 = 20;
const CAPABILITIES: u64 =
    MQES as u64 | CAP_CQR | TIMEOUT << CAP_TO_SHIFT | CAP_CSS_NVM | CAP_CSS_IOCSS | CAP_CRMS_CRWMS;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::association::{Associations, HostIdentity};
    use crate::nvme::event_queue::EventQueue;
    use crate::nvme::nqn::Nqn;
    use std::sync::Arc;

    const ENABLE: u64 = 0x0046_0061;

    fn bench() -> (Arc<Associations>, AdminQueueGuard, HostIdentity) {
        let all = Arc::new(Associations::default());
        let host = HostIdentity { nqn: Nqn::new("nqn.h").unwrap(), id: [1; 16] };
        let place = all.connect_admin((host.clone(), true), None, EventQueue::new(None)).unwrap();
        (all, place, host)
    }

    #[test]
    fn a_controller_goes_from_enable_to_shutdown_to_reset() {
        let (all, place, host) = bench();
        let mut properties = Properties::default();
        let csts = |properties: &Properties| properties.get(&place, CSTS, false).unwrap();
        assert_eq!((csts(&properties), properties.is_ready()), (0, false));
        properties.set(&place, CC, false, ENABLE).unwrap();
        assert_eq!((csts(&properties), properties.is_ready()), (1, true));
        let queue = all.connect_io(&host, place.cntlid, 1, None, EventQueue::new(None)).unwrap();
        properties.set(&place, CC, false, ENABLE | 1 << CC_SHN_SHIFT).unwrap();
        assert_eq!((csts(&properties), properties.is_ready()), (0b0101, false));
        drop(queue);
        assert_eq!(csts(&properties), 0b1001);
        properties.set(&place, CC, false, 0).unwrap();
        assert_eq!(csts(&properties), 0);
        properties.set(&place, CC, false, ENABLE).unwrap();
        assert_eq!((csts(&properties), properties.is_ready()), (1, true));
    }

    #[test]
    fn a_controller_is_ready_until_the_io_of_its_queues_is_over() {
        let (all, place, host) = bench();
        let mut properties = Properties::default();
        properties.set(&place, CC, false, ENABLE).unwrap();
        let queue = all.connect_io(&host, place.cntlid, 1, None, EventQueue::new(None)).unwrap();
        properties.set(&place, CC, false, 0).unwrap();
        assert_eq!((properties.get(&place, CSTS, false), properties.is_ready()), (Ok(1), false));
        drop(queue);
        assert_eq!(properties.get(&place, CSTS, false), Ok(0));
    }

    #[test]
    fn an_unusable_configuration_sets_the_fatal_status() {
        let (_all, place, _) = bench();
        // A page size of 8 KiB, another command set, other entry sizes.
        for wrong in [ENABLE | 1 << 7, 0x0046_0011, 0x0045_0061, 0x0036_0061, ENABLE | 1 << 11] {
            let mut properties = Properties::default();
            properties.set(&place, CC, false, wrong).unwrap();
            assert_eq!(properties.get(&place, CSTS, false), Ok(CSTS_CFS.into()), "{wrong:x}");
            assert!(!properties.is_ready());
        }
    }

    #[test]
    fn properties_have_their_sizes_and_only_cc_can_be_set() {
        let (_all, place, _) = bench();
        let mut properties = Properties::default();
        assert_eq!(properties.get(&place, CAP, true).unwrap() & 0xffff, 1023);
        assert_eq!(properties.get(&place, VS, false), Ok(0x20000));
        for (offset, is_long) in [(CAP, false), (VS, true), (CC, true), (0x10, false), (u32::MAX, false)] {
            assert_eq!(properties.get(&place, offset, is_long), Err(NvmeStatus::INVALID_FIELD_IN_COMMAND));
        }
        for (offset, is_long) in [(CAP, true), (VS, false), (CC, true), (CSTS, false)] {
            assert_eq!(
                properties.set(&place, offset, is_long, 1),
                Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
                "{offset:x}"
            );
        }
    }
}
