//! The feature Temperature Threshold (Base 2.0 §5.27.1.3). There is no sensor, so the composite
//! temperature never changes; a host that sets a threshold which it exceeds is warned.

use blockmux_wire::nvme::feature::{THSEL_OVER, THSEL_UNDER, TMPSEL_ALL, TMPSEL_COMPOSITE};
use blockmux_wire::nvme::status::NvmeStatus;

/// The thresholds of the composite temperature, in kelvins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TemperatureThresholds {
    over: u16,
    under: u16,
}

impl Default for TemperatureThresholds {
    fn default() -> TemperatureThresholds {
        TemperatureThresholds { over: WARNING_K, under: 0 }
    }
}

impl TemperatureThresholds {
    /// The value for Get Features with this CDW11.
    pub(super) fn get(&self, cdw11: u32) -> Result<u16, NvmeStatus> {
        let mut all = *self;
        all.selected(cdw11).copied()
    }

    /// Sets a threshold by Set Features with this CDW11.
    pub(super) fn set(&mut self, cdw11: u32) -> Result<(), NvmeStatus> {
        *self.selected(cdw11)? = cdw11 as u16;
        Ok(())
    }

    /// Whether the temperature is a critical warning.
    pub(super) fn is_exceeded(&self) -> bool {
        TEMPERATURE_K >= self.over || TEMPERATURE_K <= self.under
    }

    fn selected(&mut self, cdw11: u32) -> Result<&mut u16, NvmeStatus> {
        match (cdw11 >> 16 & 0xf, cdw11 >> 20 & 3) {
            (TMPSEL_COMPOSITE | TMPSEL_ALL, THSEL_OVER) => Ok(&mut self.over),
            (TMPSEL_COMPOSITE | TMPSEL_ALL, THSEL_UNDER) => Ok(&mut self.under),
            _ => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
        }
    }
}

/// The composite temperature, in kelvins: 0 would be below every threshold.
pub(super) const TEMPERATURE_K: u16 = 300;
/// Temperatures of a warning and of a critical state, in kelvins; the standard recommends the first
/// and allows no 0.
pub(super) const WARNING_K: u16 = 0x157;
pub(super) const CRITICAL_K: u16 = 0x16b;
