use std::fmt;

/// An architecture to compile for: `90a` is `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    /// Ten times the major number plus the minor: 90, 120.
    pub cc: u32,
    /// Whether it is architecture-specific: the `a`.
    pub specific: bool,
}

impl Arch {
    /// Architecture-specific instructions began with Hopper.
    const FIRST_SPECIFIC: u32 = 90;

    fn parse(entry: &str) -> Option<Self> {
        let (digits, specific) = match entry.strip_suffix('a') {
            Some(digits) => (digits, true),
            None => (entry, false),
        };
        let plain = (2..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        let cc = if plain { digits.parse().ok()? } else { return None };
        (!digits.starts_with('0') && (!specific || cc >= Self::FIRST_SPECIFIC))
            .then_some(Arch { cc, specific })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.cc, if self.specific { "a" } else { "" })
    }
}

/// Reads a list such as `80,90a,100a,120a`. Sorted, each once.
///
/// # Errors
///
/// Names the entry that is no architecture.
pub fn parse_archs(list: &str) -> Result<Vec<Arch>, String> {
    let entry = |entry: &str| {
        Arch::parse(entry.trim()).ok_or_else(|| {
            format!("{:?} is no CUDA architecture: expected one such as 80, 90a or 120a", entry.trim())
        })
    };
    let mut archs = list.split(',').map(entry).collect::<Result<Vec<_>, _>>()?;
    archs.sort();
    archs.dedup();
    Ok(archs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        let shown =
            |list| parse_archs(list).map(|archs| archs.iter().map(Arch::to_string).collect::<Vec<_>>());
        assert_eq!(shown("90a").unwrap(), ["90a"]);
        assert_eq!(shown("120a, 80,100a,90a").unwrap(), ["80", "90a", "100a", "120a"]);
        assert_eq!(shown("90a,90,90a").unwrap(), ["90", "90a"]);
    }

    #[test]
    fn a_bad_entry_is_named() {
        for (list, bad) in [
            ("", "\"\""),
            ("90a,", "\"\""),
            ("90a,sm_80", "\"sm_80\""),
            ("9.0", "\"9.0\""),
            ("80a", "\"80a\""),
            ("100f", "\"100f\""),
            ("090", "\"090\""),
            ("+90", "\"+90\""),
            ("1", "\"1\""),
            ("90000", "\"90000\""),
            ("é", "\"é\""),
        ] {
            let reason = parse_archs(list).unwrap_err();
            assert!(reason.starts_with(&format!("{bad} is no CUDA architecture")), "{list}: {reason}");
        }
    }
}
