//! What an initiator says once in a login, of itself and of what it wants (RFC 7143 §13).

/// What was declared, by key.
#[derive(Default)]
pub(super) struct Declarations([Option<Box<str>>; KEYS.len()]);

impl Declarations {
    /// Notes a key; whether it was declared otherwise before, which no login survives (RFC 7143
    /// §6.3). libiscsi says the same once more in its next stage, and no target refuses that.
    pub(super) fn is_contradicted(&mut self, key: &str, value: &str) -> bool {
        let declared = KEYS.iter().zip(&mut self.0).find(|(known, _)| **known == key);
        declared.is_some_and(|(_, declared)| **declared.get_or_insert_with(|| value.into()) != *value)
    }
}

const KEYS: [&str; 4] = ["InitiatorName", "InitiatorAlias", "TargetName", "SessionType"];
