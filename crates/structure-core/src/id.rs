use std::fmt;

use serde::{Serialize, Serializer};

/// The name of an implementation: the structure it implements and which variant of it this is.
///
/// Printed and serialised as `structure/variant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StructureId {
    /// The structure, such as `linear_proj`.
    pub structure: &'static str,
    /// The variant, such as `w8a16_static`.
    pub variant: &'static str,
}

impl fmt::Display for StructureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.structure, self.variant)
    }
}

impl Serialize for StructureId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
