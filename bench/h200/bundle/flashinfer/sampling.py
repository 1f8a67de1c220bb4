from flashinfer import absent

chain_speculative_sampling = absent
min_p_sampling_from_probs = absent
sampling_from_logits = absent
sampling_from_probs = absent
softmax = absent
top_k_renorm_prob = absent
top_k_renorm_probs = absent
top_k_sampling_from_probs = absent
top_k_top_p_sampling_from_logits = absent
top_k_top_p_sampling_from_probs = absent
top_p_renorm_prob = absent
top_p_renorm_probs = absent
top_p_sampling_from_probs = absent
