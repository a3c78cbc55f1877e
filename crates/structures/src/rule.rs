use std::str::FromStr;

use globset::{GlobBuilder, GlobMatcher};
use linear_proj::Door;
use structure_core::Refusal;

/// What a rule puts into the seats that it selects.
#[derive(Clone, Copy)]
pub enum Target {
    /// An implementation.
    Variant(Door),
    /// The host's own form, against an earlier rule.
    Host,
}

/// `PATTERN=VARIANT`: which seats get which implementation. Of several rules that select a seat the last one counts.
///
/// PATTERN is a glob over seat paths in which `*` also crosses dots, so `*` is every seat and `*.mlp.*` every projection of
/// every MLP. VARIANT is `structure/variant`, or a variant of `linear_proj` alone, or `host`.
#[derive(Clone)]
pub struct Rule {
    pattern: String,
    matcher: GlobMatcher,
    target: Target,
}

impl Rule {
    /// Whether it selects a seat.
    pub fn selects(&self, path: &str) -> bool {
        self.matcher.is_match(path)
    }

    /// What it puts there.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Its pattern as it was written.
    pub fn pattern(&self) -> &str {
        &self.pattern
    }
}

impl FromStr for Rule {
    type Err = Refusal;

    fn from_str(rule: &str) -> Result<Self, Refusal> {
        let malformed = |problem: String| Refusal::MalformedRule { rule: rule.to_string(), problem };
        let (pattern, variant) =
            rule.split_once('=').ok_or_else(|| malformed("there is no `=` in it".to_string()))?;
        if pattern.is_empty() {
            return Err(malformed("the pattern before `=` is empty".to_string()));
        }
        let glob = GlobBuilder::new(pattern)
            .literal_separator(false)
            .build()
            .map_err(|error| malformed(error.kind().to_string()))?;
        let target = match variant.split_once('/') {
            Some((linear_proj::STRUCTURE, variant)) => Target::Variant(crate::linear_proj(variant)?),
            // Says what exists, or that the structure has no seats that a rule could bind.
            Some((structure, variant)) => {
                let id = crate::get(structure, variant)?.id;
                return Err(malformed(format!(
                    "{id} does not go into the seats of {}",
                    linear_proj::STRUCTURE
                )));
            }
            None if variant == "host" => Target::Host,
            None => Target::Variant(crate::linear_proj(variant)?),
        };
        Ok(Rule { pattern: pattern.to_string(), matcher: glob.compile_matcher(), target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(rule: &str) -> String {
        rule.parse::<Rule>().err().map(|refusal| refusal.to_string()).unwrap_or_default()
    }

    #[test]
    fn stars_cross_dots() {
        let rule: Rule = "model.*.mlp.*=linear_proj/w8a16_static".parse().unwrap();
        assert!(rule.selects("model.layers.0.mlp.up_proj"));
        assert!(!rule.selects("model.layers.0.self_attn.q_proj"));
        assert!("*=w8a16_static".parse::<Rule>().unwrap().selects("lm_head"));
        assert!(matches!("lm_head=host".parse::<Rule>().unwrap().target(), Target::Host));
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert_eq!(
            refusal("w8a16_static"),
            "rule `w8a16_static`: there is no `=` in it; write PATTERN=VARIANT"
        );
        assert!(refusal("=w8a16_static").contains("the pattern before `=` is empty"));
        assert!(refusal("[=w8a16_static").contains("unclosed character class"));
        assert_eq!(
            refusal("*=nope"),
            "unknown variant `nope` of linear_proj; linked here: nvfp4_balance, nvfp4_dynamic, w8a16_static"
        );
        let known = "unknown structure `nope`; linked here: decode_loop, linear_proj";
        assert!(refusal("*=nope/x").starts_with(known));
        assert!(
            refusal("*=decode_loop/whole_step")
                .contains("decode_loop/whole_step does not go into the seats of linear_proj")
        );
    }
}
