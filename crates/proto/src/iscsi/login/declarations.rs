//! What an initiator says once in a login, of itself and of what it wants (RFC 7143 §13).

/// Which declarations were made.
#[derive(Default)]
pub(super) struct Declarations([bool; KEYS.len()]);

impl Declarations {
    /// Notes a key; whether it was declared before, which no login survives (RFC 7143 §6.3).
    pub(super) fn is_repeated(&mut self, key: &str) -> bool {
        let declared = KEYS.iter().zip(&mut self.0).find(|(known, _)| **known == key);
        declared.is_some_and(|(_, is_declared)| std::mem::replace(is_declared, true))
    }
}

const KEYS: [&str; 4] = ["InitiatorName", "InitiatorAlias", "TargetName", "SessionType"];
