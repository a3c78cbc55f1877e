use std::fmt;

use serde::{Serialize, Serializer};

/// The compute capability of a device, such as 9.0 for an H200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// 9 in 9.0.
    pub major: u32,
    /// 0 in 9.0.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An architecture that machine code was built for: `sm_80`, or `sm_90a` when it is architecture-specific.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    /// Ten times the major number plus the minor: 90, 120.
    cc: u32,
    /// Whether the code uses the instructions of this architecture alone (the `a` of `sm_90a`).
    specific: bool,
}

impl Arch {
    /// `Arch::new(90, true)` is `sm_90a`.
    pub const fn new(cc: u32, specific: bool) -> Self {
        Arch { cc, specific }
    }

    /// Whether machine code for this architecture runs on a device: the same major number with a minor at least as
    /// large, or exactly the same when architecture-specific (CUDA programming guide, binary compatibility).
    pub const fn runs_on(self, device: ComputeCapability) -> bool {
        let (major, minor) = (self.cc / 10, self.cc % 10);
        major == device.major && if self.specific { minor == device.minor } else { minor <= device.minor }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.cc, if self.specific { "a" } else { "" })
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_runs_where_the_programming_guide_says() {
        let cc = |major, minor| ComputeCapability { major, minor };
        assert!(Arch::new(80, false).runs_on(cc(8, 0)));
        assert!(Arch::new(80, false).runs_on(cc(8, 9)));
        assert!(!Arch::new(86, false).runs_on(cc(8, 0)));
        assert!(!Arch::new(80, false).runs_on(cc(9, 0)));
        assert!(Arch::new(90, true).runs_on(cc(9, 0)));
        assert!(!Arch::new(100, true).runs_on(cc(10, 3)));
        assert!(Arch::new(120, true).runs_on(cc(12, 0)));
        assert_eq!(Arch::new(90, true).to_string(), "sm_90a");
        assert_eq!(Arch::new(120, false).to_string(), "sm_120");
    }
}
