//! The registry holds exactly what is linked, and says what exists.

use libtest_mimic::Trial;

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("registry::the_exact_set", || {
            let ids: Vec<String> =
                structures::list().unwrap().iter().map(|registration| registration.id.to_string()).collect();
            assert_eq!(
                ids,
                [
                    "decode_loop/fp8_kv",
                    "decode_loop/whole_step",
                    "linear_proj/nvfp4_balance",
                    "linear_proj/nvfp4_dynamic",
                    "linear_proj/w8a16_static"
                ]
            );
            Ok(())
        }),
        Trial::test("registry::an_exported_entry_is_the_registered_one", || {
            let found = structures::get("linear_proj", "w8a16_static").unwrap();
            assert!(std::ptr::eq(found, &linear_proj_w8a16_static::ENTRY));
            Ok(())
        }),
        Trial::test("registry::a_door_is_of_its_structure", || {
            assert!(structures::decode_loop("whole_step").is_ok());
            assert!(structures::linear_proj("whole_step").is_err());
            let loops = structures::get("decode_loop", "whole_step").unwrap();
            let refusal = linear_proj::Door::of(loops).err().unwrap().to_string();
            assert!(refusal.starts_with("decode_loop/whole_step does not provide the factory"), "{refusal}");
            let store = structures::decode_loop("whole_step").unwrap().kv().err().unwrap().to_string();
            assert_eq!(
                store,
                "the implementation is decode_loop/whole_step; it must be a store of keys and values"
            );
            Ok(())
        }),
        Trial::test("registry::what_exists_is_said", || {
            let refusal = structures::get("linear_proj", "nope").unwrap_err().to_string();
            assert_eq!(
                refusal,
                "unknown variant `nope` of linear_proj; linked here: nvfp4_balance, nvfp4_dynamic, w8a16_static"
            );
            let refusal = structures::get("nope", "nope").unwrap_err().to_string();
            let known = "unknown structure `nope`; linked here: decode_loop, linear_proj (";
            assert!(refusal.starts_with(known), "{refusal}");
            Ok(())
        }),
        Trial::test("registry::every_entry_says_what_was_built_or_why_not", || {
            for registration in structures::list().unwrap() {
                let kernels = registration.kernels;
                assert_eq!(kernels.built.is_empty(), !kernels.why_not.is_empty(), "{}", registration.id);
                assert_eq!(kernels.source_digest.len(), 64, "{}", registration.id);
            }
            Ok(())
        }),
    ]
}
