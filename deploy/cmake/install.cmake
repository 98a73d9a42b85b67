# cmake --install BUILD [--prefix DIR] [--component NAME]. Components:
#   runtime  bin/kvasir and bin/kvasir-worker; kvasir finds the worker beside itself
#   deploy   lib/systemd/system, and share/kvasir with configuration, Kubernetes manifests and monitoring
# Files for /etc are examples in share/kvasir/config: an installation never replaces what was edited.
include(GNUInstallDirs)
install(TARGETS kvasir kvasir-worker COMPONENT runtime RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES LICENSE COMPONENT runtime DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES deploy/systemd/kvasir.service deploy/systemd/kvasir-worker@.service
  COMPONENT deploy DESTINATION lib/systemd/system)
install(DIRECTORY deploy/config deploy/kubernetes deploy/monitoring COMPONENT deploy DESTINATION ${CMAKE_INSTALL_DATADIR}/kvasir
  USE_SOURCE_PERMISSIONS PATTERN "__pycache__" EXCLUDE)
