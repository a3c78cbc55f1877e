use std::str::FromStr;

use structure_core::Refusal;

use crate::config::{Config, FfnConfig, LayerType, SparseFfnConfig};

/// The shape of a published model, to be measured without its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// 27 billion weights, dense.
    Dense27B,
    /// 35 billion weights, 3 billion of them active: 8 of 256 experts and a shared one.
    Sparse35BA3B,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Preset; 2] = [Preset::Dense27B, Preset::Sparse35BA3B];

    /// Its name on a command line: `27b`, `35b-a3b`.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Dense27B => "27b",
            Preset::Sparse35BA3B => "35b-a3b",
        }
    }

    /// Its shape. No token ends a text.
    pub fn config(self) -> Config {
        let (layers, hidden_size, num_attention_heads, num_key_value_heads, value_heads, ffn) = match self {
            Preset::Dense27B => (64, 5120, 24, 4, 48, FfnConfig::Dense { intermediate_size: 17408 }),
            Preset::Sparse35BA3B => {
                let sparse = SparseFfnConfig {
                    num_experts: 256,
                    num_experts_per_tok: 8,
                    moe_intermediate_size: 512,
                    shared_expert_intermediate_size: 512,
                };
                (40, 2048, 16, 2, 32, FfnConfig::Sparse(sparse))
            }
        };
        let every_fourth = |layer: usize| match layer % 4 {
            3 => LayerType::FullAttention,
            _ => LayerType::LinearAttention,
        };
        Config {
            vocab_size: 248_320,
            hidden_size,
            layer_types: (0..layers).map(every_fourth).collect(),
            ffn,
            num_attention_heads,
            num_key_value_heads,
            head_dim: 256,
            rotary_dim: 64,
            rope_theta: 1e7,
            rms_norm_eps: 1e-6,
            linear_conv_kernel_dim: 4,
            linear_num_key_heads: 16,
            linear_num_value_heads: value_heads,
            linear_key_head_dim: 128,
            linear_value_head_dim: 128,
            max_position_embeddings: 262_144,
            tie_word_embeddings: false,
            eos_token_ids: Vec::new(),
        }
    }
}

impl FromStr for Preset {
    type Err = Refusal;

    fn from_str(name: &str) -> Result<Self, Refusal> {
        Preset::ALL.into_iter().find(|preset| preset.name() == name).ok_or_else(|| Refusal::ValueOutside {
            what: "the shape".to_string(),
            value: format!("`{name}`"),
            bound: Preset::ALL.map(Preset::name).join(" or "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_and_others_are_refused() {
        for preset in Preset::ALL {
            assert_eq!(preset.name().parse(), Ok(preset));
        }
        let refusal = "7b".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(refusal, "the shape is `7b`; it must be 27b or 35b-a3b");
    }
}
